"""One run of the recovery trials: it meets its faults, and is continued by the same command until it is whole.

Owns the run, on this machine or on a Slurm, and the reading of the outcome of each fault from its timelines.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.utils import shared_files
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun
from tests.recovery.trial_page import RecoveryTrial
from tests.support.runs.launched import PROMPTS, Launched, Launches

ATTEMPT_SECONDS = 2400.0
"""Deadline of one job; a run that exceeds it hangs."""
TRAINER = "trainer"
Line = dict[str, Any]


@dataclass
class PlannedFault:
    """The fault of a trial, as `faults=` has it, and the steps of RL and of SFT at which it happens at the latest."""

    trial: RecoveryTrial
    text: str
    step: int
    sft_step: int

    @property
    def role(self) -> str:
        """The name of the role in timelines."""
        target, bracket, index = self.text.partition(":")[2].partition("@")[0].partition("[")
        return f"{target}.{index.rstrip(']') if bracket else 0}"


class Job(Protocol):
    """A run's newest job."""

    run: RunPaths

    @property
    def attempts(self) -> list[AttemptPaths]: ...


def make_run(faults: Sequence[PlannedFault], *, slurm: bool, nodes: int) -> None:
    """Make a run with these faults, and write the outcome of each into its trial."""
    steps = max(fault.step for fault in faults) + 2
    config = [
        f"training.steps={steps}",
        f"training.sft.steps={max(fault.sft_step for fault in faults) + 1}",
        "training.eval_every=2",
        "training.checkpoint_every=2",
        "resources.inference.nodes=1",
        f"resources.trainer.nodes={nodes}",
        "resources.trainer.processes=1",
        "cluster.heartbeat_seconds=20",
        *(f"recovery.{role}={len(faults)}" for role in {fault.role.partition(".")[0] for fault in faults}),
        f"faults=[{','.join(fault.text for fault in faults)}]",
    ]
    with tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder:
        with _on_slurm(Path(folder), config) if slurm else _here(Path(folder), config) as jobs:
            for job, code in jobs:
                if code == 0 or len(job.attempts) > len(faults):
                    break
        _record(faults, job, steps, code)


@contextmanager
def _here(folder: Path, config: Sequence[str]) -> Iterator[Iterator[tuple[Launched, int]]]:
    """Jobs on this machine, each with its exit code; no process is left after any."""

    def jobs(launches: Launches) -> Iterator[tuple[Launched, int]]:
        while True:
            launched = launches.submit("r", *config)
            deadline = time.monotonic() + ATTEMPT_SECONDS
            while launched.process.poll() is None and time.monotonic() < deadline:
                launched.processes()
                time.sleep(0.2)
            code = launched.end(1)  # `TimeoutExpired` for a run that hangs
            launched.assert_nothing_left()
            yield launched, code

    with Launches(folder) as launches:
        yield jobs(launches)


@contextmanager
def _on_slurm(folder: Path, config: Sequence[str]) -> Iterator[Iterator[tuple[SlurmRun, int]]]:
    """Jobs on a Slurm of four nodes, each with 0 for a job that is COMPLETED."""
    gpus = ("resources.trainer.gpus=1", "resources.inference.gpus=2")

    def jobs(slurm: SlurmCluster) -> Iterator[tuple[SlurmRun, int]]:
        while True:
            run = SlurmRun.start(slurm, folder, "r", *config, *gpus)
            yield run, int(run.wait_for_end(ATTEMPT_SECONDS)["JobState"] != "COMPLETED")

    with SlurmCluster(folder / "slurm") as slurm:
        yield jobs(slurm)


def _record(faults: Sequence[PlannedFault], job: Job, steps: int, code: int) -> None:
    attempts = [(attempt, _timeline(attempt)) for attempt in job.attempts]
    for fault in faults:
        happened = [(attempt, lines) for attempt, lines in attempts if _find(fault, lines)]
        if not happened:
            fault.trial.problem = "the fault did not happen"
            continue
        (attempt, lines), *_ = happened
        _read_outcome(fault, lines)
        failure = shared_files.read_document(attempt.first_failure, FirstFailure)
        role = fault.role.partition(".")[0]
        if fault.trial.outcome == "ended" and (failure is None or failure.role.partition(".")[0] != role):
            fault.trial.problem = f"another first failure: {failure.one_line() if failure else 'none'}"
    difference = _difference(faults, job, [line for _, lines in attempts for line in lines], steps, code)
    for fault in faults:
        fault.trial.problem = fault.trial.problem or difference


def _timeline(attempt: AttemptPaths) -> list[Line]:
    lines = [json.loads(line) for file in attempt.timeline.glob("*.jsonl") for line in file.open()]
    return sorted(lines, key=lambda line: line["time"])


def _find(fault: PlannedFault, lines: Sequence[Line]) -> Line | None:
    return next((line for line in lines if (line["role"], line["detail"]) == (fault.role, fault.text)), None)


def _read_outcome(fault: PlannedFault, lines: Sequence[Line]) -> None:
    """Read the outcome and its times from the attempt's timeline; the back-off before the restart does not count."""
    line = _find(fault, lines)
    assert line is not None
    after = [other for other in lines if other["role"] == fault.role and other["time"] > line["time"]]
    found = next(other for other in after if other["state"] not in ("ready", "fault"))
    fault.trial.detected = found["time"] - line["time"]
    outcomes = {"restarting": "restarted", "failed": "ended"}
    fault.trial.outcome = outcomes.get(found["state"], "finished")
    if fault.trial.outcome == "restarted":
        # At the end of a run the role may be stopped before its new process starts, or is ready.
        later = after[after.index(found) + 1 : after.index(found) + 3]
        if [other["state"] for other in later] == ["starting", "ready"]:
            fault.trial.recovered = fault.trial.detected + later[1]["time"] - later[0]["time"]


def _difference(faults: Sequence[PlannedFault], job: Job, lines: Sequence[Line], steps: int, code: int) -> str:
    """The difference of a run from an undisturbed one, apart from its attempts and restarts; empty if there is none.

    Each attempt but the last ended with a fault that ends attempts, and no role was restarted without a fault.
    """
    rows = [json.loads(line) for line in job.run.metrics.read_text().splitlines()]
    trained = [row["step"] for row in rows if (row["kind"], row["job"]) == ("train", "rl")]
    ledger = [json.loads(line) for line in job.run.ledger.read_text().splitlines()]
    positions = [line["position"] for line in ledger]
    # A request that runs while a server crashes three times fails its sample, so a position may be lost to faults.
    done = sum(line["outcome"] == "trained" for line in ledger)
    restarts = sorted(line["role"] for line in lines if line["state"] == "restarting")
    expected = sorted(fault.role for fault in faults if fault.trial.outcome == "restarted")
    attempts = 1 + sum(fault.trial.outcome == "ended" for fault in faults)
    checks = {
        f"exit code {code}": code == 0,
        f"steps {trained}": trained == list(range(1, steps + 1)),
        f"{len(positions) - len(set(positions))} repeated positions": len(positions) == len(set(positions)),
        f"{done} trained positions": done == steps * PROMPTS,
        f"{len(job.attempts)} attempts instead of {attempts}": len(job.attempts) == attempts,
        f"restarts of {restarts} instead of {expected}": restarts == expected,
        "no exported model": (job.run.model / "model.safetensors").exists(),
    }
    return "; ".join(text for text, holds in checks.items() if not holds)[:600]
