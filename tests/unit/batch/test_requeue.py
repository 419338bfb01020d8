"""The requeue as it is carried out: what is read, waited for, written and asked, in which order."""

import os
import shutil
import signal
import time

import pytest

from pipeline.errors import SchedulerError
from pipeline.run.events import Events
from pipeline.run.run_documents import Finished, Outcome, SubmittedJob
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.agent_heartbeat import unexited_ranks
from slurm.batch import requeue
from slurm.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.fakes.requeued_job import Cluster, fail


def test_an_attempt_that_was_told_to_end_is_requeued_once(cluster: Cluster) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    outcome = cluster.end()
    assert outcome.decision == "requeued"
    assert outcome.reason == "stop requested (SIGTERM, agent.0): it resumes from its newest checkpoint"
    assert cluster.scheduler.requeued == [cluster.job]


def test_a_finished_run_is_never_requeued(cluster: Cluster) -> None:
    paths = cluster.attempt()
    fail(paths)
    shared_files.write_document(cluster.run.paths.finished, Finished(time=0.0, steps=1, attempt=paths.attempt))
    assert cluster.end().decision == "finished"
    assert not cluster.scheduler.requeued


def test_a_rank_without_its_mark_is_lost(cluster: Cluster) -> None:
    paths = cluster.attempt()
    cluster.leave(paths, 0, 2)
    assert unexited_ranks(FileSharedDir(paths.root), 4) == (1, 3)


def test_no_rank_is_lost_where_every_agent_returned_by_itself(cluster: Cluster) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths, 0)  # the marks of the others are not to be seen yet
    outcome = cluster.end(0)
    assert (outcome.decision, outcome.failures) == ("requeued", 0)
    assert "without an exit marker" not in outcome.reason


@pytest.mark.parametrize("code", [141, 233])
def test_a_job_whose_node_died_is_requeued_whatever_srun_makes_of_it(cluster: Cluster, code: int) -> None:
    paths = cluster.attempt()
    if code == 141:  # 233: the node was gone before any agent began
        cluster.leave(paths, 0, 2, 3)
    outcome = cluster.end(code)
    assert (outcome.decision, outcome.failures) == ("requeued", 1)
    assert f"without an exit marker (exit code {code})" in outcome.reason
    assert cluster.scheduler.requeued == [cluster.job]


def test_a_time_limit_that_is_shorter_than_the_start_up_ends_the_job(cluster: Cluster) -> None:
    for failures, decision in ((1, "requeued"), (2, "stopped")):
        paths = cluster.attempt()
        Events(paths).publish("draining", "agent.0", "SIGUSR2")
        cluster.leave(paths)
        outcome = cluster.end()
        assert (outcome.decision, outcome.failures) == (decision, failures)


def test_a_finished_run_needs_no_word_of_the_scheduler(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = cluster.attempt()
    shared_files.write_document(cluster.run.paths.finished, Finished(time=0.0, steps=1, attempt=paths.attempt))
    cluster.scheduler.fail("job", times=10_000, said="Unable to contact slurm controller")
    monkeypatch.setattr(SlurmScheduler, "queue", lambda _self, _seconds: cluster.scheduler)
    monkeypatch.setenv("SLURM_JOB_ID", cluster.job)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        assert requeue.main([str(cluster.run.root), "0"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    outcome = shared_files.read_document(paths.outcome, Outcome)
    assert outcome is not None
    assert outcome.decision == "finished"


def test_commits_are_what_keeps_a_failing_job_alive(cluster: Cluster) -> None:
    for step in (5, 10):
        paths = cluster.attempt()
        fail(paths)
        cluster.leave(paths)
        cluster.commit(paths, step)
        outcome = cluster.end(1)
        assert (outcome.decision, outcome.failures) == ("requeued", 0)
    paths = cluster.attempt()
    fail(paths)
    cluster.leave(paths)
    outcome = cluster.end(1)
    assert (outcome.decision, outcome.failures) == ("requeued", 1)
    paths = cluster.attempt()
    fail(paths)
    cluster.leave(paths)
    outcome = cluster.end(1)
    assert (outcome.decision, outcome.failures) == ("stopped", 2)
    assert len(cluster.scheduler.requeued) == 3


def test_a_commit_of_an_attempt_that_slurm_cut_off_begins_the_count_anew(cluster: Cluster) -> None:
    cluster.leave(cluster.attempt(), 1)
    assert cluster.end(137).failures == 1
    cut_off = cluster.attempt()
    cluster.commit(cut_off, 3)
    cluster.scheduler.requeue(cluster.job)  # the scheduler does it, and nobody writes an outcome
    paths = cluster.attempt()
    fail(paths)
    cluster.leave(paths)
    outcome = cluster.end(1)
    assert (outcome.decision, outcome.failures) == ("requeued", 1)


def test_what_jobs_of_files_commit_counts_as_commits_of_the_run(cluster: Cluster) -> None:
    """They keep it elsewhere: the trainer's mark tells of it. Each attempt here runs out of time."""
    for committed in (True, False, False):
        paths = cluster.attempt()
        Events(paths).publish("draining", "agent.0", signal.SIGUSR2.name)
        if committed:
            paths.checkpointed.touch()
        cluster.leave(paths)
        outcome = cluster.end()
    assert (outcome.decision, outcome.failures) == ("stopped", 2)
    assert cluster.restart == 2


def test_of_two_attempts_with_a_mark_the_later_counts_although_its_clock_is_behind(cluster: Cluster) -> None:
    for skew in (0.0, -3600.0):
        paths = cluster.attempt()
        paths.checkpointed.touch()
        written = time.time() + skew
        os.utime(paths.checkpointed, (written, written))
        fail(paths)
        cluster.leave(paths)
        assert cluster.end(1).failures == 0


def test_a_folder_that_is_no_attempt_of_the_job_is_not_counted(cluster: Cluster) -> None:
    """Such as a copy that a user made of an attempt with a checkpoint, which job files have elsewhere."""
    paths = cluster.attempt()
    paths.checkpointed.touch()
    shutil.copytree(paths.root, paths.root.with_name(f"{paths.attempt}-old"))
    fail(paths)
    cluster.leave(paths)
    outcome = cluster.end(1)
    assert (outcome.decision, outcome.failures) == ("requeued", 0)


def test_a_job_that_failed_after_its_commits_is_tried_again(cluster: Cluster) -> None:
    paths = cluster.attempt()
    paths.checkpointed.touch()
    fail(paths)
    cluster.leave(paths)
    assert cluster.end(1).decision == "requeued"


def test_a_run_with_nothing_left_but_jobs_that_failed_is_not_queued_again(cluster: Cluster) -> None:
    """Although others were done in the attempt."""
    paths = cluster.attempt()
    paths.checkpointed.touch()
    paths.exhausted.touch()
    fail(paths)
    cluster.leave(paths)
    outcome = cluster.end(1)
    assert outcome.decision == "stopped"
    assert outcome.reason.endswith("no job file is left that another attempt could execute")
    assert not cluster.scheduler.requeued


def test_an_attempt_that_slurm_cut_off_does_not_count(cluster: Cluster) -> None:
    cluster.leave(cluster.attempt(), 1)
    assert cluster.end(137).failures == 1
    cluster.attempt()
    cluster.scheduler.requeue(cluster.job)
    cluster.leave(cluster.attempt(), 1)
    outcome = cluster.end(137)
    assert (outcome.decision, outcome.failures) == ("stopped", 2)


def test_being_told_to_end_because_another_rank_failed_is_no_preemption(cluster: Cluster) -> None:
    paths = cluster.attempt()
    fail(paths, time=20.0)
    Events(paths).publish("draining", "agent.2", "SIGTERM")  # at a time long after
    cluster.leave(paths)
    assert cluster.end(1).decision == "stopped"


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
def test_the_clocks_of_two_machines_do_not_say_which_came_first(cluster: Cluster, skew: float) -> None:
    """The one that wrote the failure down is ahead of, or behind, the one that told the attempt to end."""
    for told_first, decision in ((True, "requeued"), (False, "stopped")):
        paths = cluster.attempt()
        events, tells = Events(paths), [("draining", "SIGTERM"), ("failed", "trainer.0 died")]
        for name, detail in tells if told_first else reversed(tells):
            events.publish(name, "agent.0", detail)
        fail(paths, time=time.time() + skew)
        cluster.leave(paths)
        assert cluster.end(1).decision == decision


def test_a_scheduler_that_is_silent_for_a_while_is_asked_again(cluster: Cluster) -> None:
    Events(cluster.attempt()).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(cluster.run.paths.attempt(cluster.run.identity.run_id, f"{cluster.job}-0"))
    cluster.scheduler.fail("job", times=5)
    cluster.scheduler.fail("requeue", times=4)
    assert cluster.end().decision == "requeued"
    assert cluster.scheduler.requeued == [cluster.job]
    assert sum(cluster.clock.slept) < 2 * requeue.ANSWER_SECONDS


def test_a_requeue_whose_answer_was_lost_is_not_made_twice(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    really = cluster.scheduler.requeue

    def lose_the_answer(job: str) -> None:
        really(job)
        raise SchedulerError("scontrol requeue: no answer within 60 s")

    monkeypatch.setattr(cluster.scheduler, "requeue", lose_the_answer)
    assert cluster.end().decision == "requeued"
    assert cluster.scheduler.requeued == [cluster.job]


def test_a_job_that_is_cancelled_before_the_requeue_stays_cancelled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)

    def refuse(job: str) -> None:
        cluster.scheduler.set(job, "COMPLETING")
        raise SchedulerError("scontrol requeue: Job/step already completing or completed")

    monkeypatch.setattr(cluster.scheduler, "requeue", refuse)
    outcome = cluster.end()
    assert (outcome.decision, outcome.reason) == ("left", "the scheduler is ending the job (COMPLETING)")


def test_a_scheduler_that_never_answers_stops_the_job_with_its_words(cluster: Cluster) -> None:
    paths = cluster.attempt()
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    cluster.leave(paths)
    cluster.scheduler.fail("requeue", times=10_000, said="Unable to contact slurm controller")
    outcome = cluster.end()
    assert outcome.decision == "stopped"
    assert "Unable to contact slurm controller" in outcome.reason
    assert requeue.ANSWER_SECONDS <= sum(cluster.clock.slept) < requeue.ANSWER_SECONDS + requeue.LONGEST_PAUSE


def test_a_job_that_no_longer_owns_the_run_ends_without_a_trace(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = SubmittedJob(kind="slurm", job="99", user="alice", host="login", time=0.0)
    shared_files.write_document(cluster.run.paths.job, record)
    monkeypatch.setenv("SLURM_JOB_ID", cluster.job)
    assert requeue.main([str(cluster.run.root), "0"]) == 1
    assert "belongs to another job" in capsys.readouterr().out
    assert not cluster.run.paths.attempts.exists()
