"""What becomes of a job after an attempt: the decision itself, over every end and every sequence of ends."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.run.run_documents import Outcome
from slurm.batch.attempt_summary import AttemptSummary
from slurm.batch.requeue import decide
from slurm.scheduler.scheduler_protocol import RUNNING, QueuedJob

CLUSTER = ClusterConfig(scheduler="slurm", max_restarts=9, max_failures=3)
STOPPED = AttemptSummary(restart=2, stop_reason="stop requested (SIGUSR2, agent.1)", trained=True)
FAILED = AttemptSummary(restart=2, failure="trainer.0 on rank 1: exited with code 1", trained=True)
LOST = AttemptSummary(restart=2, lost=(1, 2), code=137)
LATE = replace(STOPPED, notice=True)


def job(state: str = RUNNING, *, restarts: int = 2, reason: str = "") -> QueuedJob:
    return QueuedJob(id="7", name="test", user="alice", state=state, reason=reason, restarts=restarts)


@pytest.mark.parametrize(
    ("facts", "queued", "decision", "says"),
    [
        (replace(STOPPED, finished=True), job(), "finished", "finished"),
        (replace(FAILED, finished=True), job("COMPLETING"), "finished", "finished"),
        (STOPPED, None, "left", "has dropped the job"),
        (STOPPED, job(restarts=3), "left", "restart 3"),
        (STOPPED, job("COMPLETING"), "left", "COMPLETING"),
        (STOPPED, job("PENDING"), "left", "PENDING"),
        (STOPPED, job("CANCELLED"), "left", "CANCELLED"),
        (FAILED, job("COMPLETING"), "left", "COMPLETING"),
        (STOPPED, job("COMPLETING", reason="TimeLimit"), "requeued", "SIGUSR2"),
        (STOPPED, job("COMPLETING", reason="TimeLimit", restarts=3), "left", "restart 3"),
        (STOPPED, replace(job("COMPLETING"), preempted=True), "requeued", "SIGUSR2"),
        (STOPPED, replace(job("COMPLETING", restarts=3), preempted=True), "left", "restart 3"),
        (replace(STOPPED, finished=True), replace(job("COMPLETING"), preempted=True), "finished", "finished"),
        (STOPPED, job("SIGNALING"), "requeued", "newest checkpoint"),
        (STOPPED, job(), "requeued", "agent.1"),
        (replace(STOPPED, trained=False), job(), "requeued", "stop requested"),
        (replace(STOPPED, failures=3), job(), "requeued", "stop requested"),
        (LATE, job(), "requeued", "try 1 without"),
        (replace(LATE, failures=2), job(), "stopped", "3 attempts in a row"),
        (replace(LATE, failures=2), job("COMPLETING", reason="TimeLimit"), "stopped", "ran out of time"),
        (replace(STOPPED, failures=2), job("COMPLETING", reason="TimeLimit"), "stopped", "ran out of time"),
        (replace(LATE, failures=2, advanced=True), job(), "requeued", "newest checkpoint"),
        (replace(LATE, failures=9), replace(job(), preempt_pending=True), "requeued", "newest checkpoint"),
        (
            replace(LATE, failures=9),
            replace(job("COMPLETING"), preempted=True, preempt_pending=True),
            "requeued",
            "newest",
        ),
        (replace(STOPPED, restart=9), job(restarts=9), "stopped", "max_restarts=9"),
        (replace(STOPPED, restart=8), job(restarts=8), "requeued", "stop requested"),
        (FAILED, job(), "requeued", "try 1 without"),
        (replace(FAILED, failures=1), job(), "requeued", "try 2 without"),
        (replace(FAILED, failures=2), job(), "stopped", "3 attempts in a row"),
        (replace(FAILED, failures=2, advanced=True), job(), "requeued", "had saved a checkpoint"),
        (replace(FAILED, trained=False), job(), "stopped", "before the first checkpoint"),
        (replace(FAILED, trained=False, lost=(0,)), job(), "requeued", "exited with code 1"),
        (replace(FAILED, trained=False, stop_reason="stop requested"), job(), "requeued", "exited with code 1"),
        (LOST, job(), "requeued", "ranks 1-2 ended without an exit marker"),
        (replace(LOST, stop_reason="stop requested", failures=2), job(), "stopped", "ranks 1-2"),
        (AttemptSummary(restart=2, code=3), job(), "stopped", "exit code 3"),
    ],
)
def test_each_end_of_an_attempt_has_its_decision(
    facts: AttemptSummary, queued: QueuedJob | None, decision: str, says: str
) -> None:
    outcome = decide(facts, queued, CLUSTER, 5.0)
    assert (outcome.decision, outcome.time) == (decision, 5.0)
    assert says in outcome.reason
    assert "\n" not in outcome.reason


@pytest.mark.parametrize(
    ("facts", "queued", "count"),
    [
        (FAILED, job(), 1),
        (replace(FAILED, failures=1), job(), 2),
        (replace(FAILED, failures=2, advanced=True), job(), 0),
        (replace(STOPPED, failures=2), job(), 2),
        (replace(LATE, failures=2), job(), 3),
        (replace(LATE, failures=2, advanced=True), job(), 0),
        (replace(LATE, failures=2), replace(job(), preempt_pending=True), 2),
        (replace(STOPPED, failures=2), job("COMPLETING", reason="TimeLimit"), 3),
        (replace(STOPPED, failures=2, advanced=True), job(), 0),
        (replace(FAILED, failures=2), job("COMPLETING"), 2),
        (replace(LOST, failures=2), job("COMPLETING"), 2),
    ],
)
def test_only_failures_and_time_limits_without_a_commit_are_counted(
    facts: AttemptSummary, queued: QueuedJob, count: int
) -> None:
    assert decide(facts, queued, CLUSTER, 0.0).failures == count


ENDS = st.fixed_dictionaries(
    {
        "finished": st.sampled_from([False] * 9 + [True]),
        "stop_reason": st.sampled_from(["", "stop requested"]),
        "notice": st.booleans(),
        "failure": st.sampled_from(["", "a role died"]),
        "lost": st.sampled_from([(), (), (0,), (0, 1)]),
        "advanced": st.booleans(),
        "slurm_has_it": st.sampled_from([False, False, False, True]),
        "preempt_pending": st.booleans(),
        "reason": st.sampled_from(["", "", "TimeLimit"]),
    }
)


def live(ends: list[dict[str, object]], cluster: ClusterConfig) -> list[Outcome]:
    """The outcomes of one job's attempts that end in these ways, until it is not queued again."""
    outcomes: list[Outcome] = []
    trained, failures = False, 0
    for restart, end in enumerate(ends):
        left = dict(end)
        restarts = restart + bool(left.pop("slurm_has_it"))
        queued = replace(
            job(restarts=restarts, reason=str(left.pop("reason"))), preempt_pending=left.pop("preempt_pending")
        )  # type: ignore[arg-type]
        left["notice"] = bool(left["notice"] and left["stop_reason"])
        trained = trained or bool(left["advanced"])
        facts = AttemptSummary(restart=restart, trained=trained, failures=failures, **left)  # type: ignore[arg-type]
        outcome = decide(facts, queued, cluster, 0.0)
        outcomes.append(outcome)
        failures = outcome.failures
        if outcome.decision in ("finished", "stopped"):
            break
    return outcomes


LIMITS = st.builds(
    ClusterConfig, scheduler=st.just("slurm"), max_restarts=st.integers(0, 6), max_failures=st.integers(1, 4)
)


@given(st.lists(ENDS, max_size=20), LIMITS)
def test_a_job_is_never_requeued_beyond_its_budget_nor_after_it_finished(
    ends: list[dict[str, object]], cluster: ClusterConfig
) -> None:
    outcomes = live(ends, cluster)
    for restart, (end, outcome) in enumerate(zip(ends, outcomes, strict=False)):
        if outcome.decision == "requeued":
            assert restart < cluster.max_restarts
            assert not end["finished"]
            assert not end["slurm_has_it"]


@given(st.lists(ENDS, max_size=20), LIMITS)
def test_a_loop_of_failures_and_time_limits_stops_within_max_failures_attempts(
    ends: list[dict[str, object]], cluster: ClusterConfig
) -> None:
    failures = 0
    for end, outcome in zip(ends, live(ends, cluster), strict=False):
        if end["advanced"]:
            failures = 0
        elif not end["slurm_has_it"] and (end["failure"] or end["lost"] or not end["stop_reason"] or _is_late(end)):
            failures += 1
        if outcome.decision == "requeued":
            assert failures < cluster.max_failures


def _is_late(end: dict[str, object]) -> bool:
    return end["reason"] == "TimeLimit" or bool(end["notice"] and not end["preempt_pending"])


PREEMPTED = st.fixed_dictionaries(
    {
        "finished": st.just(False),
        "stop_reason": st.just("stop_reason"),
        "notice": st.booleans(),
        "failure": st.just(""),
        "lost": st.just(()),
        "advanced": st.booleans(),
        "slurm_has_it": st.just(False),
        "preempt_pending": st.just(True),
        "reason": st.just(""),
    }
)


@given(st.lists(PREEMPTED, min_size=1, max_size=20), LIMITS)
def test_preemptions_alone_stop_a_job_only_at_max_restarts(
    ends: list[dict[str, object]], cluster: ClusterConfig
) -> None:
    decisions = [outcome.decision for outcome in live(ends, cluster)]
    assert decisions[: cluster.max_restarts] == ["requeued"] * min(len(ends), cluster.max_restarts)
    assert decisions[cluster.max_restarts :] in ([], ["stopped"])
