"""A trial of attached servers on one machine: two servers come and go, again and again, in one run of a tiny model.

    python -m tests.recovery.attached_trials --cycles 10

Owns the trial, and its table: the tokens per second with the run's own server alone, with two more, and their ratio, in
each cycle. Then it ends the run and checks that nothing was lost and nothing is left. Each server runs at most
`SEQUENCES` sequences at a time, so that its speed, not the trainer's, bounds the run's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from statistics import geometric_mean

from pipeline.roles.role_context import RoleContext
from pipeline.run.joined_servers import JoinedServers
from pipeline.transport import connect
from pipeline.transport.shared_state import SharedState
from pipeline.utils.waiting import wait_for
from tests.support.runs.launched import PROMPTS, ROOT, Launched, Launches, is_free

SECONDS = 900.0
"""Deadline of each wait; a trial that exceeds it hangs."""
SEQUENCES = 8
CONFIG = (
    "resources.inference.nodes=1",
    "resources.trainer.processes=1",
    "task.processes=1",
    "training.steps=100000",
    f"inference.max_sequences={SEQUENCES}",
    "training.checkpoint_every=100",
)


@dataclass
class Cycle:
    """Tokens per second without and with the attached servers, and the seconds until these served."""

    alone: float
    joined: float
    wait: float


class Trial:
    """One run, to which servers are attached."""

    def __init__(self, run: Launched, window: float) -> None:
        self.run, self._window = run, window
        self.endpoints: set[str] = set()

    def cycle(self) -> Cycle:
        """Measure, attach two servers, measure, detach them."""
        alone = self._rate()
        command = [sys.executable, "launchers/attach.py", f"run={self.run.run.root}", "servers=2"]
        started = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as attached:
            try:
                self._wait("two more servers", 3)
                wait, joined = time.monotonic() - started, JoinedServers(self.run.attempts[-1])
                self.endpoints |= set(joined.read())
                rate = self._rate()
                detach = [sys.executable, "launchers/detach.py", f"run={self.run.run.root}"]
                subprocess.run(detach, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
                assert attached.wait(SECONDS) == 0, "attach.py failed"
            finally:
                attached.kill()
        self._wait("one server", 1)
        return Cycle(alone, rate, wait)

    def problems(self) -> list[str]:
        """End the run, and name what was lost or left; empty if nothing was."""
        attempt = self.run.attempts[-1]
        actor = RoleContext.from_arguments([str(attempt.run), attempt.run_id, attempt.attempt, "actor", "0"])
        with connect(actor) as streams:
            posted = list(SharedState(streams).servers())
        own = [placement.endpoint for placement in actor.world.of_role("inference")]
        self.run.interrupt(SIGINT)
        code = self.run.end(SECONDS)
        steps = [row["step"] for row in self.run.rows()]
        positions = [json.loads(line)["position"] for line in self.run.run.ledger.read_text().splitlines()]
        retries = {name: value for name, value in self._numbers().items() if name.startswith("retries/")}
        print(f"{len(steps)} steps; requests sent again: {retries}")
        checks = {
            f"exit code {code}": code == 130,
            f"steps {steps}": steps == list(range(1, len(steps) + 1)),
            f"{len(positions)} positions": len(positions) == len(set(positions)) == len(steps) * PROMPTS,
            f"{len(self.run.attempts)} attempts": len(self.run.attempts) == 1,
            f"Redis has {posted}": posted == own,
            "records of servers": not list(attempt.joined_servers.iterdir()),
            "ports": all(is_free(*_place(endpoint)) for endpoint in self.endpoints),
            "failed samples": not any(name.startswith("failed/") for name in self._numbers()),
        }
        self.run.assert_nothing_left()
        return [text for text, holds in checks.items() if not holds]

    def _rate(self) -> float:
        """Tokens per second that the actor received from the servers during the window."""
        began, first = time.monotonic(), self._numbers()["completion_tokens"]
        time.sleep(self._window)
        return (self._numbers()["completion_tokens"] - first) / (time.monotonic() - began)

    def _wait(self, what: str, servers: int) -> None:
        """Until so many servers have weights: the actor reports those that it may send requests to."""

        def have() -> bool:
            self.run.processes()
            names = [name for name in self._numbers() if name.startswith("idle/")]
            busy = [name for name in names if self._numbers().get(name, 1.0) < 1.0]
            return len(names) == len(busy) == servers

        wait_for(what, have, SECONDS, pause=0.2)

    def _numbers(self) -> dict[str, float]:
        status = self.run.attempts[-1].status("actor.0")
        numbers: dict[str, float] = json.loads(status.read_text())["body"]["numbers"]
        return numbers


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery.attached_trials")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--window", type=float, default=15.0, help="seconds of each measurement")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rollcall-trial-") as folder, Launches(Path(folder)) as launches:
        run = launches.submit("r", *CONFIG)
        run.wait_for_step(3, SECONDS)
        trial = Trial(run, options.window)
        print("| cycle | tokens/s, 1 server | tokens/s, 3 servers | ratio | seconds to join |\n|---|---|---|---|---|")
        ratios = []
        for number in range(1, options.cycles + 1):
            made = trial.cycle()
            ratios.append(made.joined / made.alone)
            print(
                f"| {number} | {made.alone:.0f} | {made.joined:.0f} | {ratios[-1]:.2f} | {made.wait:.0f} |", flush=True
            )
        print(f"| geometric mean | | | {geometric_mean(ratios):.2f} | |")
        problems = trial.problems()
    print("; ".join(problems) or "nothing was lost, and nothing is left")
    return 1 if problems else 0


def _place(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.partition(":")
    return address, int(port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
