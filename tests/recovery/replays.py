"""Replays of a whole run through the launchers: killed at five points, and by other numbers of processes.

    python -m tests.recovery.replays              # records a small run first, with real servers
    python -m tests.recovery.replays --run DIR    # replays an existing run on this machine

Prints for each replay whether its weights are those of the uninterrupted one, and those of the recorded run.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from pipeline.observability.run_check import check_run
from pipeline.run.paths import RunPaths
from tests.recovery.schedules import CONFIG, STEPS
from tests.support.runs.launched import ROOT, Launches

SECONDS = 900.0
KILLS = {
    "sft": "kill:trainer@sft",
    "step": "kill:trainer@step=3",
    "save": "kill:trainer@save",
    "last step": f"kill:trainer@step={STEPS}",
    "end": "kill:trainer@end",
}
"""Kill points: a step of SFT, a step of RL, a checkpoint that is being written, the last step, the last checkpoint."""
PROCESSES = "resources.trainer.processes"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery.replays", description="Replays of a whole run.")
    parser.add_argument("--run", type=Path, help="a finished run to replay; default: record one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rollcall-replays-") as folder, Launches(Path(folder)) as launches:
        run = RunPaths(options.run.resolve()) if options.run else _recorded(launches)
        return _replay_all(run, Path(folder))


def _recorded(launches: Launches) -> RunPaths:
    launched = launches.submit("recorded", *CONFIG)
    code = launched.end(SECONDS)
    assert code == 0, launched.output()
    return launched.run


def _replay_all(run: RunPaths, output: Path) -> int:
    """Replay the run in every way; 1 if weights that must be equal are not."""
    whole = _replay(run, output, "whole")
    _show("uninterrupted", whole, whole, run)
    equal = True
    for name, fault in KILLS.items():
        killed = _replay(run, output, f"killed-{name.replace(' ', '-')}", f"faults=[{fault}]", "recovery.trainer=1")
        equal &= _show(f"killed at: {name}", killed, whole, run)
    _show("2 processes", _replay(run, output, "two", f"{PROCESSES}=2"), whole, run)
    for turn, processes in enumerate((2, 1, 2)):
        # The first two attempts end at a step without a checkpoint of it: the next goes on with other processes.
        fault = (f"faults=[kill:trainer@step={2 * turn + 2}]",) if turn < 2 else ("faults=[]",)
        mixed = _replay(run, output, "mixed", f"{PROCESSES}={processes}", "recovery.trainer=0", *fault, ends=turn == 2)
    _show("2, then 1, then 2 processes", mixed, whole, run)
    return 0 if equal else 1


def _replay(run: RunPaths, output: Path, name: str, *overrides: str, ends: bool = True) -> RunPaths:
    command = [sys.executable, "launchers/replay.py", f"run={run.root}", f"output={output}", f"name={name}", *overrides]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode == 0) == ends, ended.stdout + ended.stderr
    if ends:
        assert not check_run(output / name).problems, check_run(output / name).problems
    return RunPaths(output / name)


def _show(what: str, replay: RunPaths, whole: RunPaths, run: RunPaths) -> bool:
    """Print a line of the table; whether the weights are those of the uninterrupted replay."""
    largest = _difference(replay, whole)
    print(f"{what:30}  {_text(largest):30}  {_text(_difference(replay, run))}", flush=True)
    return largest == 0


def _difference(one: RunPaths, other: RunPaths) -> float:
    """The largest difference of a weight of two exported models; 0 if they have the same bits."""
    mine, theirs = (load_file(run.model / "model.safetensors") for run in (one, other))
    return _largest(mine, theirs)


def _largest(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    assert mine.keys() == theirs.keys()
    if all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs):
        return 0.0
    return max(float(np.abs(mine[name].astype(float) - theirs[name].astype(float)).max()) for name in theirs)


def _text(difference: float) -> str:
    return "the same bits" if difference == 0 else f"largest difference {difference:.1e}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
