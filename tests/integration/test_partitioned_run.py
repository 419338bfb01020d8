"""Whole runs on a network and a file system with injected faults: a node that is cut off, files that appear late."""

import pytest

from pipeline.observability.run_check import check_run
from tests.support.runs.launched import STEPS, Launches

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.trial]

SECONDS = 8.0


@pytest.mark.parametrize("rank", [1, 2])
def test_a_run_continues_after_its_trainer_or_a_server_was_cut_off(launches: Launches, rank: int) -> None:
    faults = f"faults=[partition:node[{rank}]={SECONDS}s@step=3,late:names=3s]"
    run = launches.submit("r", "resources.inference.nodes=2", faults)
    run.wait_for_step(1)
    assert run.end(400.0) == 0, run.output()
    assert run.history().count((f"{'trainer' if rank == 1 else 'inference'}.0", "fault")) == 1
    assert {state for _, state in run.history()} <= {"starting", "ready", "fault", "stopping", "stopped"}
    assert len(run.attempts) == 1
    times = {row["step"]: row["time"] for row in run.rows()}
    assert list(times) == list(range(1, STEPS + 1))
    gap = max(later - times[step] for step, later in zip(times, list(times.values())[1:], strict=False))
    assert gap > SECONDS - 2 or rank == 2, "without its server's node the run samples on the other one"
    assert check_run(run.run.root).problems == ()
    run.assert_nothing_left()
