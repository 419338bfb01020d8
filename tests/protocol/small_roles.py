"""An attempt of three ranks whose roles are small scripts, with the real supervisors."""

import json
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import psutil

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.config.recovery_keys import RecoveryConfig
from pipeline.roles import RoleCommand
from pipeline.roles.role_context import RoleContext
from pipeline.run.events import Events
from pipeline.run.first_failure import FirstFailure
from pipeline.run.paths import WORLD, AttemptPaths
from pipeline.run.poll_rates import ReadSchedule
from pipeline.topology.plan import NodeInfo, Placement, RoleName, World
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from slurm.agent.node_takeover import WorldFollower
from slurm.agent.role_lifecycle import End
from slurm.agent.supervisor import StopRequest, Supervisor
from slurm.submission.compose_config import compose_config

FOREVER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{FOREVER}"
BEATS = """
import threading, time
from pipeline.utils import heartbeat
heartbeat.start()
print('up', flush=True)
def work():
    while True:
        heartbeat.beat()
        time.sleep(0.05)
"""
STUCK = """
def get_stuck():
    time.sleep(600)
"""
UNTIL_TOLD = (
    "import sys, time, pathlib; print('up', flush=True)\n"
    "while not list(pathlib.Path(sys.argv[1]).glob('*.json')): time.sleep(0.02)"
)
SPARE = NodeInfo(
    rank=3, attempt="a-0", hostname="", pid=0, boot="", addresses=("127.0.0.5",), probe_port=0, ports=(1, 2)
)
RANKS: dict[RoleName, int] = {"redis": 0, "preprocessor": 0, "actor": 0, "trainer": 1, "inference": 2}


@dataclass
class Attempt:
    """An attempt of three ranks whose roles are small scripts."""

    paths: AttemptPaths
    cluster: ClusterConfig
    scripts: dict[RoleName, str]
    gpus: dict[RoleName, tuple[int, ...]] = field(default_factory=dict)
    restarts: int = 0
    faults: str = ""
    ports: dict[RoleName, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    supervisors: dict[int, Supervisor] = field(default_factory=dict)
    notices: dict[int, StopRequest] = field(default_factory=dict)
    spare: bool = False
    """Whether rank 3 is a spare node, and the agents follow the revisions of the world."""
    spoken: threading.Event = field(default_factory=threading.Event)
    """Until it is set, whoever asks whether a mute role is ready gets no answer."""
    others: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children(recursive=True)))

    @property
    def events(self) -> Events:
        return Events(self.paths)

    @property
    def first_failure(self) -> FirstFailure:
        """What the agents wrote of it; they did."""
        failure = shared_files.read_document(self.paths.first_failure, FirstFailure)
        assert failure is not None
        return failure

    def launch(self, context: RoleContext) -> RoleCommand:
        role = context.placement.role
        more = ("--restart", str(context.restart)) if context.restart else ()
        argv = (sys.executable, "-c", self.scripts[role], str(self.paths.events), *more)
        return RoleCommand(
            argv=argv, ready=lambda: self.is_ready(role), has_heartbeat=self.scripts[role].count("heartbeat.start")
        )

    def is_ready(self, role: RoleName) -> bool:
        """Whether it printed `up`; what a script has in its comments goes wrong."""
        if "# mute" in self.scripts[role]:
            self.spoken.wait(60)
        if "# no log" in self.scripts[role]:
            raise FileNotFoundError("no log")
        return b"up" in self.paths.log(role, 0).read_bytes()

    def start(self) -> None:
        keys = (f"recovery.{role}={self.restarts}" for role in RecoveryConfig.model_fields)
        config = compose_config(["experiment=demo", f"faults=[{self.faults}]", *keys])
        places = tuple(
            Placement(
                role=role,
                index=0,
                rank=rank,
                address="127.0.0.2",
                ports=self.ports.get(role, ()),
                gpus=self.gpus.get(role, ()),
            )
            for role, rank in RANKS.items()
        )
        spares = (SPARE,) if self.spare else ()
        world = World(run_id="r", attempt="a-0", epoch=1, leader=0, secret="s", placements=places, spares=spares)
        FileSharedDir(self.paths.rendezvous).create(WORLD, world)
        for rank in sorted({*RANKS.values(), *(node.rank for node in spares)}):
            contexts = [RoleContext(self.paths, config, world, place) for place in world.of_rank(rank)]
            follower = WorldFollower(self.paths, config, rank, ReadSchedule(1)) if spares else None
            self.notices[rank] = StopRequest()
            self.supervisors[rank] = Supervisor(
                contexts, f"agent.{rank}", self.paths, self.cluster, self.notices[rank], follower=follower
            )
            thread = threading.Thread(target=self._run, args=(rank,))
            thread.start()
            self.threads.append(thread)

    def _run(self, rank: int) -> None:
        self.ends[rank] = self.supervisors[rank].run()

    def join(self, seconds: float = 30) -> set[End]:
        for thread in self.threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a supervisor did not end"
        return set(self.ends.values())

    def lines(self) -> list[dict[str, Any]]:
        """Of all timelines, by time."""
        lines = [line for file in self.paths.timeline.glob("*.jsonl") for line in file.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda entry: entry["time"])

    def history(self) -> list[tuple[str, str]]:
        return [(entry["role"], entry["state"]) for entry in self.lines()]

    def has_been(self, role: str, states: list[str]) -> bool:
        """Whether these, in this order, are all states of the role so far."""
        return [state for name, state in self.history() if name == role] == states

    def all_ready(self) -> bool:
        return self.ready() == {f"{role}.0" for role in RANKS}

    def ready(self) -> set[str]:
        return {role for role, state in self.history() if state == "ready"}

    def left(self) -> set[psutil.Process]:
        """What was started since this attempt began and is still there."""
        return set(psutil.Process().children(recursive=True)) - self.others

    def pid_of(self, role: RoleName) -> int:
        children = psutil.Process().children(recursive=True)
        return next(child.pid for child in children if self.scripts[role] in child.cmdline())

    def restart_of(self, role: RoleName) -> int:
        """The restart number on the command line of the role's process."""
        command = psutil.Process(self.pid_of(role)).cmdline()
        return int(command[command.index("--restart") + 1]) if "--restart" in command else 0
