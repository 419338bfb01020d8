"""`slurm.monitor.run_watcher`: what a launcher that follows a run for days keeps of it."""

import tracemalloc

from pipeline.run.metrics_log import MetricSinks
from slurm.monitor.run_watcher import Watcher, read_snapshot
from tests.fakes.run_directory import FakeAttempt, FakeRun

STEPS, METRICS, BYTES_PER_STEP = 2000, 60, 800
"""A row of this many metrics has 5 kB."""
ROOMS = ("pipeline", "slurm")
"""The code whose memory counts; Python's own tables double now and then."""


def test_a_watcher_keeps_little_of_each_step(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    attempt.all_roles("starting", "ready")
    watcher = Watcher(run.root)
    numbers = {f"metric/{number}": number + 0.5 for number in range(METRICS)}
    with MetricSinks(run.paths.metrics, attempt.paths.attempt) as sinks:
        sinks.log("train", "rl", 0, {"reward/mean": 0.0})
        watcher.look()
        tracemalloc.start()
        try:
            for step in range(1, STEPS + 1):
                sinks.log("train", "rl", step, numbers | {"reward/mean": step / STEPS})
                if step % 100 == 0:
                    sinks.log("eval", "rl", step, numbers | {"eval/accuracy": 0.5})
                    seen = watcher.look()
            taken = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, f"*/{room}/*") for room in ROOMS]
            )
        finally:
            tracemalloc.stop()
    assert sum(each.size for each in taken.statistics("filename")) < STEPS * BYTES_PER_STEP
    assert seen.numbers == numbers | {"reward/mean": 1.0}
    assert (len(seen.rewards), seen.rewards[-1], len(seen.accuracies)) == (STEPS + 1, 1.0, STEPS // 100)
    at_once = read_snapshot(run.root)
    assert (at_once.numbers, at_once.rewards, at_once.accuracies) == (seen.numbers, seen.rewards, seen.accuracies)


def test_rolled_back_rows_are_forgotten(run: FakeRun, attempt: FakeAttempt) -> None:
    attempt.meet()
    watcher = Watcher(run.root)
    attempt.train("rl", range(31))
    assert len(watcher.look().rewards) == 30
    lines = run.paths.metrics.read_bytes().splitlines(keepends=True)
    run.paths.metrics.unlink()
    run.paths.metrics.write_bytes(b"".join(lines[:10]))
    assert watcher.look().rewards == read_snapshot(run.root).rewards
