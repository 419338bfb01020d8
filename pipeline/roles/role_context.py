"""The inputs of every role's process at its start.

Owns the handover from the agent to a role: the run, the attempt, the placement. Promises that a role gets its config,
world and files from one object and reports its state through it. The agent builds the same object to write the role's
command line.
"""

import argparse
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pipeline.config import RunConfig
from pipeline.config.debug_keys import DEBUGGER_SECONDS
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.model_directory import model_directory
from pipeline.errors import RendezvousError, would_recur
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.run.events import Events
from pipeline.run.fault_conditions import apply_file_faults, lose_connects
from pipeline.run.fault_plan import parse_faults
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.topology.plan import Placement, RoleName, World
from pipeline.utils import logs, shared_files
from pipeline.utils.fs_retry import FINAL_WRITE_TIMEOUT, FS_OUTAGE_TIMEOUT, retry_transient

log = logging.getLogger(__name__)

PROGRESS = "progress"
"""The number in a trainer's report that counts the steps which its process has completed."""
RoleState = Literal["starting", "ready", "stopping", "stopped", "failed"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Latest state of one role: written by its process, read by the agent and the terminal view.

    `is_final`: of a failed role, whether its error is one that a restart would meet again.
    """

    state: RoleState
    pid: int
    time: float
    detail: str = ""
    is_final: bool = False
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class RoleContext:
    """One role's placement in one attempt of a run; `restart` counts the restarts of the role before this process."""

    paths: AttemptPaths
    config: RunConfig
    world: World
    placement: Placement
    restart: int = 0

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.paths.run)

    @property
    def events(self) -> Events:
        return Events(self.paths)

    def report(self, state: RoleState, detail: str = "", **numbers: float) -> None:
        """Replace this role's status file. If the disk fails, the next report replaces the lost one."""
        try:
            self._write(Status(state=state, pid=os.getpid(), time=time.time(), detail=detail, numbers=numbers))
        except OSError as error:
            log.warning("%r is not reported: %s", state, error)

    def report_failure(self, error: BaseException, text: str) -> None:
        """Report the error that ends the role, as `text`; the numbers of the last report stay."""
        last = self.status()
        final = would_recur(error, starting=last is None or last.state == "starting")
        numbers = last.numbers if last else {}
        try:
            self._write(
                Status(state="failed", pid=os.getpid(), time=time.time(), detail=text, is_final=final, numbers=numbers)
            )
        except OSError as refused:
            log.warning("'failed' is not reported: %s", refused)

    def forget_status(self) -> None:
        """Remove the last report before the role is restarted: it is its predecessor's. `OSError` if the disk fails."""
        self.paths.status(self.placement.name).unlink(missing_ok=True)

    def configure_logs(self) -> None:
        """Log as this role, at the levels of `debug.*`."""
        logs.configure(self.placement.name, self.config.debug.log_level, self.config.debug.log_modules)

    def wait_for_debugger(self, process: int = 0) -> None:
        """Wait until a debugger has attached, if `debug.role` names this process of the role."""
        role, _, index = self.config.debug.role.partition(".")
        if role != self.placement.role or int(index or 0) != process:
            return
        from pipeline.utils import remote_debugger  # a tenth of the imports of a small role, which needs it rarely

        def say(text: str) -> None:
            log.warning("%s", text)
            self.report("starting", text)

        if self.config.debug.tool == "debugpy":
            remote_debugger.wait_for_debugpy(self.config.debug.port, say)
        else:
            remote_debugger.wait_for_pdb(say)

    def announce(self, state: RoleState, detail: str) -> None:
        """Make a report that is not repeated soon and that the agent waits for; `OSError` if the disk keeps failing."""
        status = Status(state=state, pid=os.getpid(), time=time.time(), detail=detail)
        retry_transient(f"{state!r} to be reported", lambda: self._write(status), FS_OUTAGE_TIMEOUT)

    def _write(self, status: Status) -> None:
        shared_files.write_document(self.paths.status(self.placement.name), status)

    def is_ready(self) -> bool:
        """Whether the role has reported that it is ready."""
        status = self.status()
        return status is not None and status.state == "ready"

    def status(self) -> Status | None:
        """This role's last report; None without one, and while the disk fails."""
        try:
            return shared_files.read_document(self.paths.status(self.placement.name), Status)
        except OSError:
            return None

    def arguments(self) -> list[str]:
        """Command-line arguments from which `from_arguments` rebuilds this context."""
        placement = self.placement
        identity = [str(self.paths.run), self.paths.run_id, self.paths.attempt, placement.role, str(placement.index)]
        return [*identity, *(["--restart", str(self.restart)] if self.restart else [])]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> "RoleContext":
        """The context of `arguments()`; reads the config and the world from the run directory."""
        parser = argparse.ArgumentParser(description="One role of a Rollcall run; started by its agent.")
        parser.add_argument("run", type=Path)
        parser.add_argument("run_id")
        parser.add_argument("attempt")
        parser.add_argument("role")
        parser.add_argument("index", type=int)
        parser.add_argument("--restart", type=int, default=0)
        parsed = parser.parse_args(arguments)
        paths = AttemptPaths(parsed.run, parsed.run_id, parsed.attempt)
        world, placement = _world_and_placement(paths, parsed.role, parsed.index)
        config = read_config(RunPaths(parsed.run))
        faults = parse_faults(config.faults)
        apply_file_faults(paths, faults, placement.rank)
        lose_connects(paths, faults, placement.rank, world.rank_of_address)
        return cls(paths, config, world, placement, parsed.restart)


def read_config(run: RunPaths) -> RunConfig:
    """The frozen config of a run, for its processes: it must exist, and `model.path` becomes a local directory.

    With a role under a debugger, no deadline ends a wait for it.
    """
    config = retry_transient("the config", lambda: read_frozen_config(run), FINAL_WRITE_TIMEOUT)
    if config is None:
        raise RendezvousError(f"no readable config at {run.config}; submit the run again")
    model = config.model.model_copy(update={"path": str(model_directory(config.model))})
    config = config.model_copy(update={"model": model})
    return without_deadlines(config) if config.debug.role else config


def without_deadlines(config: RunConfig) -> RunConfig:
    """The config with deadlines of a week for the start, the heartbeat and the batches of roles."""
    cluster = {"heartbeat_seconds": DEBUGGER_SECONDS, "startup_seconds": DEBUGGER_SECONDS}
    sections = {
        "cluster": config.cluster.model_copy(update=cluster),
        "training": config.training.model_copy(update={"data_seconds": DEBUGGER_SECONDS}),
    }
    return config.model_copy(update=sections)


def _world_and_placement(paths: AttemptPaths, role: RoleName, index: int) -> tuple[World, Placement]:
    world = retry_transient("the world", WorldRevisions(paths).newest, FINAL_WRITE_TIMEOUT)
    if world is None:
        raise RendezvousError(f"no readable world in {paths.rendezvous}")
    for placement in world.of_role(role):
        if placement.index == index:
            return world, placement
    raise RendezvousError(f"the world of attempt {paths.attempt} has no {role}.{index}")
