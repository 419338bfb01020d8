"""An hour of random faults: does any process, file or Redis of a run grow?

    python -m tests.recovery.soak [--minutes 60] [--seed 0] [--json FILE]

One run of the demo's model on this machine, in which roles are killed, stopped or exit at random periods. Once a minute
the trial counts, by kind of process, the processes, their memory (PSS, MB) and open descriptors; the files of the run
directory and their MB, by folder; the MB of Redis's data; and files in the temporary folder and in shared memory. The
table has the median of minutes 4 to 8 and that of the last five. At the end the run is interrupted, and its files are
checked. Exits with 1 if a kind of process or Redis grew by more than `MORE`, the run's files prove anything lost, or a
process or port is left.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from signal import SIGINT
from statistics import median
from typing import Any

import psutil

from pipeline.errors import StreamError
from pipeline.observability.run_check import check_run
from pipeline.roles.role_context import RoleContext
from pipeline.transport import connect
from tests.bench.tables import markdown
from tests.support.runs.launched import Launched, Launches

KINDS = {
    "pipeline.roles.trainer": "trainer",
    "pipeline.roles.actor": "actor",
    "pipeline.roles.preprocessor": "preprocessor",
    "pipeline.inference": "server",
    "redis-server": "redis",
    "fork server": "fork servers",
    "local_controller": "controller",
    "submitit.core": "agents",
    "launchers/submit.py": "launcher",
}
"""Part of a command line → kind of process."""
FAULTS = ("kill:inference", "kill:actor", "kill:preprocessor", "kill:trainer", "kill:redis", "exit:inference[1]")
SHORTEST, LONGEST = 150, 400
"""Bounds of a fault's period, in seconds."""
SETTLED, WINDOW = range(4, 9), 5
"""The minutes of the first median, and the number of those of the last."""
MORE = 1.2
SLACK = {"MB": 20.0, "descriptors": 8.0, "processes": 0.0}
"""What may be added to a small number without being growth."""
END_SECONDS = 600.0
Counts = dict[str, float]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="all counts of all minutes")
    options = parser.parse_args(arguments)
    faults = planned(random.Random(options.seed))
    print("faults:", *faults, flush=True)
    with tempfile.TemporaryDirectory(prefix="rollcall-soak-") as folder, Launches(Path(folder)) as launches:
        run = launches.submit("r", *settings(faults))
        run.wait_for_step(1, END_SECONDS)
        minutes = watch(run, options.minutes, lambda found: save(options.json, faults, found))
        run.interrupt(SIGINT)
        code = run.end(END_SECONDS)
        problems = grown(minutes) + [f"exit code {code}"] * (code != 130) + list(check_run(run.run.root).problems)
        run.assert_nothing_left()
    print(markdown(("", "minutes 4 to 8", "last five minutes"), rows(minutes)))
    print("; ".join(problems) or "nothing grew, nothing was lost, and nothing is left")
    return int(bool(problems))


def planned(draw: random.Random) -> list[str]:
    """Each fault with a random period; different ones, so that every combination comes."""
    periods = draw.sample(range(SHORTEST, LONGEST), len(FAULTS))
    return [f"{fault}@every={period}s" for fault, period in zip(FAULTS, periods, strict=True)]


def settings(faults: Sequence[str]) -> list[str]:
    """The demo without an end, whose roles may be restarted as often as they are killed."""
    roles = ("inference", "actor", "preprocessor", "trainer", "redis")
    return [
        "training.steps=1000000",
        "training.checkpoint_every=20",
        "rollout.sample_store_bytes=20M",
        f"faults=[{','.join(faults)}]",
        *(f"recovery.{role}=1000" for role in roles),
    ]


def watch(run: Launched, minutes: int, save: Callable[[list[Counts]], None]) -> list[Counts]:
    """The counts at the end of each minute. Raises `AssertionError` if the run ends."""
    found: list[Counts] = []
    began = time.monotonic()
    for minute in range(1, minutes + 1):
        while time.monotonic() < began + 60 * minute:
            run.processes()  # also sees those that live for seconds only
            time.sleep(1)
        assert run.process.poll() is None, f"the launcher ended: {run.output()[-2000:]}"
        found.append(counts(run))
        save(found)
    return found


def counts(run: Launched) -> Counts:
    """What the run has now, by name."""
    steps = run.rows()
    found: Counter[str] = Counter({"steps": steps[-1]["step"], "attempts": len(run.attempts)})
    for process in [psutil.Process(run.process.pid), *run.processes()]:
        try:
            words = " ".join(process.cmdline())
            kind = next((kind for part, kind in KINDS.items() if part in words), "others")
            found[f"{kind}: MB"] += process.memory_full_info().pss / 1e6
            found[f"{kind}: descriptors"] += process.num_fds()
            found[f"{kind}: processes"] += 1
        except psutil.Error:
            continue  # it has just ended
    for file in run.run.root.rglob("*"):
        if file.is_file():
            folder = file.relative_to(run.run.root).parts[0]
            found[f"files of {folder}: number"] += 1
            found[f"files of {folder}: MB"] += file.stat(follow_symlinks=False).st_size / 1e6
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        found[f"entries of {folder}"] = len(list(folder.iterdir()))
    return dict(found) | redis_counts(run)


def redis_counts(run: Launched) -> Counts:
    """The MB that the attempt's Redis counts; empty while it is restarted."""
    attempt = run.attempts[-1]
    context = RoleContext.from_arguments([str(run.run.root), attempt.run_id, attempt.attempt, "actor", "0"])
    try:
        streams: Any = connect(context)
        with closing(streams):
            memory = streams.exchange(lambda: streams._client.info("memory"))["used_memory"]
            return {"redis data: MB": memory / 1e6}
    except StreamError:
        return {}


def rows(minutes: Sequence[Counts]) -> list[tuple[str, float, float]]:
    """By name, the medians of the minutes after the start and of the last ones; a minute without it counts as 0."""
    names = sorted({name for minute in minutes for name in minute})
    parts = (minutes[SETTLED.start - 1 : SETTLED.stop - 1] or minutes, minutes[-WINDOW:])
    early, late = ([round(median(m.get(name, 0.0) for m in part), 1) for name in names] for part in parts)
    return list(zip(names, early, late, strict=True))


def grown(minutes: Sequence[Counts]) -> list[str]:
    """What grew, in words: memory, descriptors and processes of each kind, and Redis."""
    found = []
    for name, early, late in rows(minutes):
        _, _, what = name.partition(": ")
        if what in SLACK and not name.startswith("files of") and late > MORE * early + SLACK[what]:
            found.append(f"{name} grew from {early:g} to {late:g}")
    return found


def save(file: Path | None, faults: Sequence[str], minutes: Sequence[Counts]) -> None:
    if file is not None:
        file.write_text(json.dumps({"faults": list(faults), "minutes": list(minutes)}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
