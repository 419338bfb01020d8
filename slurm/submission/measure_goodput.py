"""Measuring the goodput of a configuration under faults: one undisturbed run, one disturbed run, and their comparison.

    python launchers/goodput.py experiment=demo faults=kill:trainer every=120s
    python launchers/goodput.py experiment=demo cluster=slurm faults=requeue every=120s

Owns the order of the two runs and the preemption of a job at a period. Promises that a repeated command runs nothing
that has finished, and compares again. Must not know how a run is submitted (`submit_run`) or measured.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.config import ClusterConfig, RunConfig
from pipeline.errors import ConfigError, RollcallError, SchedulerError
from pipeline.observability.goodput_comparison import Comparison, compare, rl_rows, tables
from pipeline.run.goodput_records import read_goodput
from pipeline.run.metrics_log import MetricRecord
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files
from slurm.registry import run_registry
from slurm.scheduler.scheduler_registry import connect_scheduler
from slurm.submission import submit_run
from slurm.submission.compose_config import compose_config
from slurm.submission.launcher_signals import INTERRUPTED

REQUEUE = "requeue"
"""The fault that preempts the whole job, instead of a role: the scheduler ends and restarts it. A local job is ended as
by Ctrl-C, and started again."""
ALWAYS = 1000
"""Restarts that the disturbed run is allowed."""
_POLL_SECONDS = 0.5
_EVERY = re.compile(r"([1-9]\d*)s")


@dataclass(frozen=True)
class Disturbance:
    """The faults of a disturbed run, each as KIND:TARGET or `requeue`, at a period of seconds."""

    faults: tuple[str, ...]
    every: int

    def overrides(self, cluster: ClusterConfig) -> list[str]:
        """The keys of the disturbed run: the faults of roles, and enough restarts of roles and of a queued job."""
        roles = [fault for fault in self.faults if fault != REQUEUE]
        targets = sorted({fault.partition(":")[2].partition("[")[0] for fault in roles} - {"checkpoint"})
        planned = [f"faults=[{','.join(f'{fault}@every={self.every}s' for fault in roles)}]"] if roles else []
        requeues = [] if cluster.on_this_machine else [f"cluster.max_restarts={ALWAYS}"]
        return [*planned, *(f"recovery.{target}={ALWAYS}" for target in targets), *requeues]

    @property
    def requeues(self) -> bool:
        return REQUEUE in self.faults


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 if both runs finished and no prompt was lost or trained twice, 2 for invalid input."""
    try:
        disturbance, overrides = read_arguments(argv)
        config = compose_config(overrides)
        runs = [_named(config, kind) for kind in ("undisturbed", "disturbed")]
        for run, faults in zip(runs, (None, disturbance), strict=True):
            keys = [*overrides, *(faults.overrides(config.cluster) if faults else ())]
            code = _finish(run, keys, faults, config.training.steps)
            if code:
                return code
        result = compare(*runs)
        _write(config.directory.with_name(f"{config.name}-goodput"), result, *runs)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if result.disturbed.prompts_lost or result.disturbed.trained_twice else 0


def read_arguments(argv: Sequence[str]) -> tuple[Disturbance, list[str]]:
    """The disturbance, and the overrides of both runs; `ConfigError` without `faults=` or with a wrong `every=`."""
    own = {key: text.partition("=")[2] for text in argv if (key := text.partition("=")[0]) in ("faults", "every")}
    overrides = [text for text in argv if text.partition("=")[0] not in own]
    listed = re.sub(r"^\[(.*)\]$", r"\1", "".join(own.get("faults", "").split()))
    faults = tuple(fault for fault in listed.split(",") if fault)
    if not faults or any("@" in fault for fault in faults):
        expected = f"KIND:TARGET without a moment, such as kill:trainer, or {REQUEUE}"
        raise ConfigError("faults", own.get("faults"), expected, "every= has the moment")
    every = _EVERY.fullmatch(own.get("every", "120s"))
    if every is None:
        raise ConfigError("every", own["every"], "whole seconds, such as 120s", "write every=120s")
    return Disturbance(faults, int(every[1])), overrides


def _named(config: RunConfig, kind: str) -> Path:
    return config.directory.with_name(f"{config.name}-{kind}").resolve()


def _finish(run: Path, overrides: Sequence[str], disturbance: Disturbance | None, steps: int) -> int:
    """Run it to its end, over its preemptions. Returns the exit code of the last launcher."""
    preemption = Preemption(RunPaths(run), disturbance.every, steps) if disturbance and disturbance.requeues else None
    while True:
        with preemption.active() if preemption else nullcontext():
            code = submit_run.main([*overrides, f"name={run.name}"])
        if not (preemption and preemption.ended_launcher and code in INTERRUPTED):
            return code


class Preemption:
    """Preempts the job of a run each `every` seconds, counted from its first RL step and then from the preemption
    before. An attempt that has trained no step when its turn comes is preempted after its first one.

    Attributes:
        ended_launcher: whether it has ended the launcher of a local job, which its caller starts again.
    """

    def __init__(self, run: RunPaths, every: float, steps: int) -> None:
        """`steps` is the last RL step, after which no job is preempted."""
        self._run, self._every, self._steps = run, every, steps
        self._due: float | None = None
        self._struck_at = 0.0
        self.ended_launcher = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Preempt from a thread while the block runs."""
        self.ended_launcher = False
        over = threading.Event()
        thread = threading.Thread(target=self._strike_until, args=(over,), name="preemption", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _strike_until(self, over: threading.Event) -> None:
        while not (self.ended_launcher or over.wait(_POLL_SECONDS)):
            rows = rl_rows(self._run.root)
            if rows and self.is_due(rows[-1], time.time()):
                self._strike()

    def is_due(self, newest: MetricRecord, now: float) -> bool:
        """Whether the job is preempted now, given the row of its newest step."""
        if self._due is None:
            self._due = newest["time"] + self._every
        return now >= self._due and newest["time"] > self._struck_at and newest["step"] < self._steps

    def struck(self, now: float) -> None:
        """Note a preemption."""
        self._struck_at, self._due = now, now + self._every

    def _strike(self) -> None:
        job = run_registry.submitted_job(self._run)
        assert job is not None, "a run with steps has a job"
        self.struck(time.time())
        if not job.queued:
            self.ended_launcher = True
            os.kill(os.getpid(), signal.SIGINT)
            return
        try:
            connect_scheduler(job.kind).requeue(job.job)
        except SchedulerError as error:
            print(f"warning: job {job.job} is not preempted: {error}", file=sys.stderr, flush=True)


def _write(folder: Path, result: Comparison, undisturbed: Path, disturbed: Path) -> None:
    """Write `goodput.json`, `goodput.md` and two pictures, and print the tables."""
    from pipeline.observability.goodput_section import outages_chart, steps_picture  # matplotlib takes a second
    from pipeline.observability.svg_drawing import standalone

    measured, text = read_goodput(disturbed), tables(result)
    rows = rl_rows(undisturbed), rl_rows(disturbed)
    assert measured is not None, "the comparison has measured it"
    files = {
        "goodput.json": msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n",
        "goodput.md": text.encode(),
        "steps.svg": steps_picture(*rows, [outage.time for outage in measured.outages]).encode(),
        "outages.svg": standalone(outages_chart(measured).svg).encode(),
    }
    for name, content in files.items():
        shared_files.write_atomic(folder / name, content)
    print(text)
    print(f"written: {folder}/{{{','.join(files)}}}", flush=True)
