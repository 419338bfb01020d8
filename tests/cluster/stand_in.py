"""A real agent without roles, run by submitit: it does what the run's `script.json` says for this restart of the job.

One word an attempt, the last for all after it:

    late        the same as `wait`, but its agent begins seconds after submitit has installed its own signal handlers
    look        the same as `wait`, and it writes what it sees of its machine to `seen.<rank>`
    wait        until it is told to end; then it drains, and comes down in order
    stubborn    never, whatever it is told
    fail        rank 1 fails, and the others come down
    commit      the same, after a commit of a new step
    killed      the agent of rank 1 is killed
    finish      the run ends as it should
"""

import json
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.checkpoints.trainer_state import TrainerState
from pipeline.errors import RollcallError
from pipeline.run.events import Events
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files
from slurm.agent import agent
from slurm.agent.control_link import ControlLinks
from slurm.agent.role_lifecycle import End
from slurm.agent.supervisor import StopRequest
from slurm.scheduler.rank_environment import Environment
from slurm.scheduler.scheduler_registry import batch_attempt

SCRIPT = "script.json"
LONGEST = 240.0
LATE_SECONDS = 3.0
HIDDEN = ("/boot", "/opt", "/srv", "/var/lib", "/sbin")
"""Folders of a host that no run needs."""


@dataclass(frozen=True)
class StandIn:
    """What submitit pickles and calls on every rank, in the place of `Agent`."""

    run: Path

    def __call__(self) -> End:
        if word_of(RunPaths(self.run), batch_attempt()[2]) == "late":
            time.sleep(LATE_SECONDS)
        agent._run_attempt = take_part
        return agent.Agent(self.run)()


def word_of(run: RunPaths, restart: int) -> str:
    script: list[str] = json.loads((run.root / SCRIPT).read_text())
    return script[min(restart, len(script) - 1)]


def take_part(
    run: RunPaths,
    paths: AttemptPaths,
    environment: Environment,
    notice: StopRequest,
    _held: ExitStack,
    _links: ControlLinks,
) -> End:
    word = word_of(run, environment.restart)
    paths.timeline.mkdir(parents=True, exist_ok=True)
    (paths.timeline / f"{environment.rank}.{word}").touch()
    if word == "look":
        look(run, environment)
    if word == "finish":
        if environment.rank == 0:
            shared_files.create_document(run.finished, Finished(time=time.time(), steps=1, attempt=paths.attempt))
        return "finished"
    if environment.rank == 1 and word in ("fail", "commit", "killed"):
        time.sleep(0.5)
        if word == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "commit":
            step = TrainerState(job="rl", step=environment.restart + 1)
            complete_checkpoint(Storage(str(run.checkpoints)), step, paths.attempt, {}, 1)
        raise RollcallError("it was told to fail")
    return wait(paths, environment, notice, stubborn=word == "stubborn")


def look(run: RunPaths, environment: Environment) -> None:
    """Write what a container shows of itself and of its host."""
    image, names = Path("/of_the_image"), ("WANDB_API_KEY", "PYTHONPATH", "PYTHONNOUSERSITE")
    seen = {name: os.environ.get(name, "") for name in names} | {
        "image": image.read_text() if image.exists() else "no",
        "hidden": [str(path) for path in map(Path, HIDDEN) if path.exists()],
        "cwd": str(Path.cwd()),
        "blocked": [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    (run.root / f"seen.{environment.rank}").write_text(json.dumps(seen))


def wait(paths: AttemptPaths, environment: Environment, notice: StopRequest, *, stubborn: bool) -> End:
    """As a supervisor whose roles come down at once."""
    events, began = Events(paths), time.monotonic()
    while time.monotonic() - began < LONGEST:
        time.sleep(0.1)
        if events.get("failed"):
            return "failed"
        if notice.reason and not stubborn:
            events.publish("draining", f"agent.{environment.rank}", notice.reason)
        if events.get("draining"):
            return "preempted"
    raise RollcallError("nobody ended this attempt")
