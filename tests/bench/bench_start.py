"""What a start of the demo spends before its first step, with roles that are forked and with exec.

    python -m tests.bench.bench_start [--rounds N] [--out FILE] [--before CHECKOUT] [key=value …]

Each round starts, for each way in turn, a new run, ends it with Ctrl-C after its first step, and starts it again, as a
requeue does. Seconds are since the launcher's start. CPU seconds are those of all processes of the run up to the first
RL step, sampled from /proc. Imports are CPU seconds of a new interpreter, the median of three.

The machine's page cache is warm for both starts. `first` includes SFT and an evaluation, `again` a restore.

With `--before`, each round starts a new run from that checkout, with its `.venv`, and one from this checkout. Each
finds an empty home directory, thus no caches of ours or of vLLM.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from pipeline.run.metrics_log import read_rows
from pipeline.utils.fork_server import VARIABLE
from tests.bench.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    *("experiment=demo", "cluster=local", "training.sft.steps=2", "training.prompts_per_step=8"),
    *("training.eval_every=0", "task.options.held_out=32"),
)
WAYS = {"exec": {VARIABLE: "/no/server"}, "fork": {}}
"""With an address at which no fork server is, every role starts with exec."""
STARTS = ("first", "again")
DEADLINE = 400.0
TICK = 0.05
IMPORTS = {
    "launcher": "import slurm.submission.submit_run",
    "watch": "import slurm.monitor.live_view",
    "cancel": "import slurm.submission.cancel_runs",
    "agent": "import slurm.agent.agent",
    "redis": "import pipeline.roles.redis",
    "preprocessor": "import pipeline.roles.preprocessor",
    "actor": "import pipeline.roles.actor",
    "torchrun": "import torch.distributed.run",
    "trainer": "import pipeline.roles.trainer_session, pipeline.train.controller.lead_or_serve",
    "server": "import vllm.entrypoints.openai.api_server",
}


def import_seconds(code: str) -> float:
    """CPU seconds of an interpreter that only imports; the median of three."""
    return median(_cpu_of([sys.executable, "-c", code]) for _ in range(3))


def _cpu_of(command: Sequence[str]) -> float:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


class CpuSeconds:
    """The CPU seconds of a process and its descendants, of which short-lived ones are missed."""

    def __init__(self, pid: int) -> None:
        self._root, self._seconds = psutil.Process(pid), dict[tuple[int, float], float]()

    def look(self) -> float:
        with suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seconds.values())


def start(
    output: Path,
    name: str,
    overrides: Sequence[str],
    variables: Mapping[str, str],
    root: Path = ROOT,
    python: str = sys.executable,
) -> dict[str, float]:
    """Start a run, or resume it, up to its first step. Returns the seconds of its milestones, and `cpu`."""
    run, began = output / "run", time.time()
    command = [python, "launchers/submit.py", *SETTINGS, f"output={output}", "name=run", *overrides]
    cpu, milestones = 0.0, dict[str, float]()
    with (output / f"{name}.log").open("wb") as log:
        launcher = subprocess.Popen(command, cwd=root, env={**os.environ, **variables}, stdout=log, stderr=log)
        try:
            seconds = CpuSeconds(launcher.pid)
            while "first step" not in milestones:
                cpu, milestones = seconds.look(), read_milestones(run, began)
                if launcher.poll() is not None or time.time() - began > DEADLINE:
                    break
                time.sleep(TICK)
            launcher.send_signal(signal.SIGINT)
            launcher.wait(DEADLINE)
        finally:
            launcher.kill()
            launcher.wait()
    if "first step" not in milestones:
        raise SystemExit(f"no step: see {log.name}")
    return {**milestones, "cpu": cpu}


def read_milestones(run: Path, began: float) -> dict[str, float]:
    """The seconds from `began` to what the run's newest attempt has reached."""
    attempts = [folder for folder in run.glob("attempts/*") if folder.stat().st_ctime >= began]
    seconds: dict[str, float] = {}
    if not attempts:
        return seconds
    for file in attempts[0].glob("timeline/*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry["state"] in ("starting", "ready"):
                seconds.setdefault(f"{entry['role']} {entry['state']}", entry["time"] - began)
    for log in attempts[0].glob("logs/trainer.0.log"):
        if sent := [line for line in log.read_text().splitlines() if " weights " in line and " send " in line]:
            seconds["first weights"] = time_of_log_line(sent[0]) - began
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["job"] == "rl" and row["time"] >= began]
    for row in rows:
        seconds.setdefault("first step" if row["kind"] == "train" else "evaluation", row["time"] - began)
    return seconds


def time_of_log_line(line: str) -> float:
    """The time of a log line, in UTC, as seconds since the epoch."""
    return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) - time.timezone + float(line[19:23])


MILESTONES = ("trainer.0 starting", "trainer.0 ready", "inference.0 ready", "first weights", "evaluation", "first step")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--before", type=Path)
    asked = parser.parse_args(arguments)
    if asked.before:
        results = list(_compare(asked.before, asked.rounds, asked.overrides))
        print("\n" + markdown(["start", *MILESTONES, "CPU"], list(_rows(results))))
        if asked.out:
            asked.out.write_text(json.dumps({"kind": "start-before-after", "starts": results}, indent=1) + "\n")
        return
    imports = {name: import_seconds(code) for name, code in IMPORTS.items()}
    print(markdown(["imports", "CPU s"], list(imports.items())))
    results = []
    for round_ in range(asked.rounds):
        for way in WAYS:
            output = Path(tempfile.mkdtemp(prefix="start-"))
            for name in STARTS:
                spent = start(output, name, asked.overrides, WAYS[way])
                results.append({"way": way, "round": round_, "start": name, **spent})
            shutil.rmtree(output)
    print("\n" + markdown(["start", *MILESTONES, "CPU"], list(_rows(results))))
    if asked.out:
        asked.out.write_text(json.dumps({"kind": "start-cpu", "imports": imports, "starts": results}, indent=1) + "\n")


def _compare(before: Path, rounds: int, overrides: Sequence[str]) -> Iterable[dict[str, Any]]:
    """New runs with an empty home directory, of another checkout and of this one in turn."""
    pythons = {"before": (before, str(before / ".venv/bin/python")), "after": (ROOT, sys.executable)}
    for round_ in range(rounds):
        for way, (root, python) in pythons.items():
            with tempfile.TemporaryDirectory(prefix="start-") as folder:
                spent = start(Path(folder), "first", overrides, {"HOME": folder}, root, python)
                print(way, round_, {name: round(value, 1) for name, value in spent.items()}, flush=True)
                yield {"way": way, "round": round_, "start": "first", **spent}


def _rows(results: Sequence[dict[str, Any]]) -> Iterable[list[object]]:
    for way, name in dict.fromkeys((result["way"], result["start"]) for result in results):
        same = [result for result in results if (result["way"], result["start"]) == (way, name)]
        yield [f"{name}, {way}", *(_median(same, key) for key in (*MILESTONES, "cpu"))]


def _median(results: Sequence[dict[str, Any]], key: str) -> object:
    values = [result[key] for result in results if key in result]
    return median(values) if values else ""


if __name__ == "__main__":
    main(sys.argv[1:])
