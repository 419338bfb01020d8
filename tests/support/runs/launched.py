"""A launcher as a user starts it, and what its run leaves behind."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.topology.plan import NodeInfo, RoleName
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support import forks
from tests.support.processes import runs

ROOT = Path(__file__).resolve().parents[3]
STEPS, PROMPTS = 12, 8
SMALL = (
    "experiment=demo",
    "resources=four_nodes",
    "training.sft.steps=4",
    f"training.steps={STEPS}",
    f"training.prompts_per_step={PROMPTS}",
    "training.eval_every=0",
    "training.checkpoint_every=5",
    "rollout.concurrency=16",
    "task.options.held_out=32",
)
LOOK_SECONDS = 1.0
"""Between two looks at a run's processes while a test waits: one reads all of /proc."""
TWO_RANKS = "resources.trainer.processes=2"


@dataclass
class Launched:
    """One start of `launchers/submit.py`, of `launchers/train.py` or of `launchers/evaluate.py`.

    The run's roles are forked by the server of the session of tests, if there is one, so that each run need not import
    torch and vLLM. With `own_forks` it starts its own server, as a user's run does.
    """

    process: subprocess.Popen[str]
    run: RunPaths
    _family: set[psutil.Process] = field(default_factory=set)
    _looked: float = -math.inf

    @classmethod
    def start(
        cls, output: Path, name: str, *overrides: str, env: dict[str, str] | None = None, own_forks: bool = False
    ) -> "Launched":
        arguments = ("submit.py", *SMALL, f"output={output}", f"name={name}", *overrides)
        return cls._launch(RunPaths(output / name), *arguments, env=env, own_forks=own_forks)

    @classmethod
    def submit(cls, output: Path, name: str, *overrides: str, env: dict[str, str] | None = None) -> "Launched":
        """Start a run of this name with only these overrides."""
        return cls._launch(
            RunPaths(output / name), "submit.py", f"output={output}", f"name={name}", *overrides, env=env
        )

    @classmethod
    def train(cls, jobs: Path, run: Path, *arguments: str) -> "Launched":
        """Do the jobs of a file or a folder; `run` is the directory that their run has."""
        return cls._launch(RunPaths(run), "train.py", str(jobs), *arguments)

    @classmethod
    def evaluate(cls, evaluated: RunPaths, name: str, *arguments: str) -> "Launched":
        """Evaluate a run; the run that does so is called `name`, and lies beside it."""
        run = evaluated.root.with_name(name)
        return cls._launch(RunPaths(run), "evaluate.py", f"run={evaluated.root}", f"name={name}", *arguments)

    @classmethod
    def _launch(
        cls, run: RunPaths, launcher: str, *arguments: str, env: dict[str, str] | None = None, own_forks: bool = False
    ) -> "Launched":
        shared = {} if own_forks else forks.of_runs()
        process = subprocess.Popen(
            [sys.executable, f"launchers/{launcher}", *arguments],
            cwd=ROOT,
            env=os.environ | shared | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return cls(process, run)

    @property
    def attempts(self) -> list[AttemptPaths]:
        """All attempts of the run so far, the oldest first."""
        identity = shared_files.read_document(self.run.run, RunIdentity)
        if identity is None or not self.run.attempts.exists():
            return []
        folders = sorted(self.run.attempts.iterdir(), key=lambda folder: folder.stat().st_ctime)
        return [self.run.attempt(identity.run_id, folder.name) for folder in folders]

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        return [row for row in read_rows(self.run.metrics) if row["job"] == "rl" and row["kind"] == kind]

    def wait_for_step(self, step: int, seconds: float = WAIT_SECONDS) -> None:
        self.wait(f"step {step}", lambda: any(row["step"] >= step for row in self.rows()), seconds)

    def wait_for_world(self, seconds: float = WAIT_SECONDS) -> None:
        def published() -> bool:
            return any((attempt.rendezvous / "world.json").exists() for attempt in self.attempts)

        self.wait("a world", published, seconds)

    def wait_for_state(self, role: str, state: str, seconds: float = WAIT_SECONDS) -> None:
        self.wait(f"{role} {state}", lambda: (role, state) in self.history(), seconds)

    def wait(self, what: str, probe: Callable[[], bool], seconds: float) -> None:
        """A launcher that ends after it did what is waited for is no failure: a short run may."""

        def reached() -> bool:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                self.processes()
            return probe() or self.process.poll() is not None

        wait_for(what, reached, seconds)
        assert probe(), f"the launcher ended while waiting for {what}: {self.output()}"

    def history(self) -> list[tuple[str, str]]:
        """(role, state) of the newest attempt, in the order they were written by each rank."""
        folder = self.attempts[-1].timeline if self.attempts else self.run.root / "none"
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return [(entry["role"], entry["state"]) for entry in map(json.loads, lines)]

    def kill_role(self, role: RoleName, index: int) -> None:
        """SIGKILL to the process that the agent started."""
        place = next(p for p in self._world()["placements"] if (p["role"], p["index"]) == (role, index))
        if role == "redis":
            told = ["redis-server"]
        elif role == "inference":
            told = [place["address"], str(place["ports"][0])]
        else:
            told = [f"pipeline.roles.{role}"]
        found = [process for process in self.processes() if all(part in " ".join(_cmdline(process)) for part in told)]
        min(found, key=lambda process: process.create_time()).kill()

    def kill_agent(self, rank: int) -> None:
        """SIGKILL to the agent of a rank."""
        node_info = shared_files.read_document(self.attempts[-1].rendezvous / "nodes" / f"{rank}.json", NodeInfo)
        assert node_info is not None
        os.kill(node_info.pid, signal.SIGKILL)

    def interrupt(self, number: signal.Signals) -> None:
        self.processes()
        self.process.send_signal(number)

    def end(self, seconds: float = WAIT_SECONDS) -> int:
        """The launcher's exit code; what it printed is in `output`."""
        self._output = self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def kill(self) -> None:
        """End the launcher and all below it at once, and close it."""
        if self.process.poll() is None:
            self.process.kill()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()
        self.close()

    def close(self) -> None:
        """Reap the launcher and let go of its output, whatever became of the test."""
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def output(self) -> str:
        if not hasattr(self, "_output"):
            self.end(30)
        return self._output

    def failure(self) -> FirstFailure | None:
        return shared_files.read_document(self.attempts[-1].first_failure, FirstFailure)

    def processes(self) -> list[psutil.Process]:
        """Everything below the launcher, or forked for its run by the tests' server, that was ever seen and still
        runs."""
        self._looked = time.monotonic()
        if self.process.poll() is None:
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        self._family |= forks.processes_of(self.run.root)
        return [process for process in self._family if runs(process)]

    def ports(self) -> list[tuple[str, int]]:
        """Every port that an agent of this run held in any attempt."""
        found = []
        for attempt in self.attempts:
            for path in (attempt.rendezvous / "nodes").glob("*.json"):
                node_info = shared_files.read_document(path, NodeInfo)
                assert node_info is not None
                found += [(node_info.addresses[0], port) for port in (node_info.probe_port, *node_info.ports)]
        return found

    def assert_nothing_left(self, seconds: float = 60) -> None:
        """No process of the run lives and none of its ports is held, at the latest after `seconds`."""
        assert self._family, "no process of the run was ever seen"
        awaited = f"the processes of {self.run.root} to end, and its ports to be free"
        wait_for(awaited, lambda: not self.processes() and not self._held(), seconds, missing=self._left)

    def _held(self) -> list[tuple[str, int]]:
        """The ports of the run that are not free. A process that started after the last look at the launcher's children
        is in no list of theirs, and may still be ending."""
        return [place for place in self.ports() if not is_free(*place)]

    def _left(self) -> str:
        processes = [" ".join(_cmdline(process)[:6]) for process in self.processes()]
        return "; ".join([*processes, *(f"port {address}:{port}" for address, port in self._held())])

    def _world(self) -> dict[str, Any]:
        body = shared_files.unseal((self.attempts[-1].rendezvous / "world.json").read_bytes())
        assert body is not None
        world: dict[str, Any] = json.loads(body)
        return world


class Launches:
    """Launchers that one test starts; whatever is left of them ends with it.

    with Launches(tmp_path / "runs") as launches:
        run = launches.submit("r", "training.steps=3")
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._started: list[Launched] = []

    def __enter__(self) -> "Launches":
        return self

    def __exit__(self, *_: object) -> None:
        for launched in self._started:
            launched.kill()

    def submit(
        self, name: str, *overrides: str, env: dict[str, str] | None = None, own_forks: bool = False
    ) -> Launched:
        """`launchers/submit.py` with a small run of this name; the same call resumes it."""
        return self._keep(Launched.start(self._output, name, *overrides, env=env, own_forks=own_forks))

    def submit_alone(self, name: str, *overrides: str, env: dict[str, str] | None = None) -> Launched:
        """`launchers/submit.py` with only these overrides."""
        return self._keep(Launched.submit(self._output, name, *overrides, env=env))

    def train(self, jobs: Path, *overrides: str, run: str = "") -> Launched:
        """`launchers/train.py` on the jobs of a file or a folder, as the run of their name or of another one."""
        run_directory = self._output / (run or jobs.stem)
        return self._keep(Launched.train(jobs, run_directory, f"output={self._output}", *overrides))

    def evaluate(self, evaluated: RunPaths, name: str, *overrides: str) -> Launched:
        """`launchers/evaluate.py` on a run; the run that does so is called `name`, and lies beside it."""
        return self._keep(Launched.evaluate(evaluated, name, *overrides))

    def _keep(self, launched: Launched) -> Launched:
        self._started.append(launched)
        return launched


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_free(address: str, port: int) -> bool:
    """Whether nothing listens on the port, nor holds it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT hold nothing
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
