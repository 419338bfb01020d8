"""A real Slurm of several nodes on this machine, for as long as a test needs it.

Owns munged, slurmctld and one slurmd a node, as root or as an ordinary user; everything below one folder. Promises that
`close` leaves no process of theirs or of their jobs, and that two clusters on a machine do not meet. Every node has two
GPUs that are none, enough for Slurm to assign them. The partitions:

    low     the default; preempted without grace: TERM, and KILL after `kill_wait` seconds
    grace   preempted with 30 seconds of grace
    high    preempts the jobs of the other two; is never preempted

    with SlurmCluster(tmp_path) as slurm:
        job = slurm.submit("srun hostname", "--nodes=2")
        slurm.wait_for_state(job, "COMPLETED", 20)
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.errors import DeadlineError
from pipeline.utils.subprocesses import tail
from pipeline.utils.waiting import wait_for
from tests.cluster.machine import Machine

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
START_SECONDS = 120.0
DAEMONS = ("munged:", "slurmctld:", "slurmd:")
LOG_LINES = 20
"""Of each daemon, in the description of a failure."""
STEP_SECONDS = 63.0
"""How long the step daemon of the first node waits for those of the others, which may be gone, before it ends."""
SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Where daemons are found; an ordinary user's PATH leaves out the folders of the administrator."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
CONFIG = """\
ClusterName=rollcall
{controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=6
KillWait={kill_wait}
CompleteWait=0
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=0
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing_commands() -> str:
    """What this machine lacks for a cluster, as a sentence; empty if nothing."""
    missing = [command for command in COMMANDS if shutil.which(command, path=SEARCH) is None]
    return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge" if missing else ""


class SlurmCluster:
    """See the module; a context manager.

    Attributes:
        root: holds configuration, state, spools and `log/`.
        nodes: how many there are; they are called `node0`, `node1`, ….
        env: the variables with which a command talks to this Slurm.
    """

    def __init__(self, root: Path, *, nodes: int = 4, kill_wait: int = 30) -> None:
        self.root, self.nodes, self._kill_wait = root, nodes, kill_wait
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.env = {**outer, "PATH": SEARCH, "SLURM_CONF": str(root / "slurm.conf")}
        self._machines: dict[str, Machine] = {}
        self._ports: list[socket.socket] = []

    def __enter__(self) -> "SlurmCluster":
        try:
            self._configure()
            self._boot("munged", self._munged())
            wait_for("munged to listen", (self.root / "munge/socket").exists, START_SECONDS)
            self.start_controller()
            for node in range(self.nodes):
                self.start_node(node)
            self.wait_until_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all jobs and end every process; `AssertionError` if one is left."""
        if "slurmctld" in self._machines:
            self._cancel_all()
        for name in list(self._machines):
            self._machines.pop(name).power_off()
        for port in self._ports:
            port.close()
        left = self.processes_left()
        assert not left, f"these processes outlived their Slurm: {left}"

    def run(self, *argv: str, seconds: float = 30.0) -> str:
        """What a command of this Slurm prints; `AssertionError` with its complaint when it fails."""
        done = subprocess.run(
            self.wrap(argv), env=self.env, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)} exited with {done.returncode}: {done.stderr.strip()}"
        return done.stdout.strip()

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` where this cluster's users log in."""
        return list(argv)

    def on_node(self, node: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the machine of a node, outside of any job."""
        return list(argv)

    def submit(self, script: str, *options: str) -> str:
        """The id of a new job that runs these lines in bash; it writes `<root>/<id>.out` unless told otherwise."""
        file = self.root / "submitted.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        output = f"--output={self.root}/%j.out"
        return self.run("sbatch", "--parsable", "--open-mode=append", output, *options, str(file))

    def job(self, job: str) -> dict[str, str]:
        """The fields that Slurm shows of a job, as JobState or Restarts; of a het job those of its leader."""
        line = self.run("scontrol", "show", "job", "--oneliner", job).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Z]\S*=|$)", line))

    def nodes_of(self, fields: Mapping[str, str]) -> list[int]:
        """The numbers of the nodes that a job has, from its fields."""
        names = self.run("scontrol", "show", "hostnames", fields["NodeList"]).splitlines()
        return [int(name.removeprefix("node")) for name in names]

    def wait_for_state(self, job: str, state: str, seconds: float) -> dict[str, str]:
        """The fields of the job once it has this state; `AssertionError` as soon as it ended in another."""
        return self._wait_for(job, f"be {state}", lambda fields: fields["JobState"] == state, seconds)

    def wait_for_restart(self, job: str, restarts: int, seconds: float) -> dict[str, str]:
        """The fields of the job once it was requeued so often; `AssertionError` as soon as it ended instead."""
        return self._wait_for(job, f"restart ({restarts})", lambda fields: int(fields["Restarts"]) >= restarts, seconds)

    def node_states(self) -> dict[str, str]:
        """`{"node0": "idle"}`, with the marks that sinfo adds, as in `idle*`."""
        return dict(line.split() for line in self.run("sinfo", "-hN", "-p", "low", "-o", "%N %T").splitlines())

    def wait_until_idle(self, seconds: float = START_SECONDS) -> None:
        """Until every node is up and free."""
        try:
            wait_for("all nodes to be idle", self._is_idle, seconds, missing=self.describe, longest_pause=0.1)
        except AssertionError as error:
            raise DeadlineError("all nodes to be idle", seconds, str(error)) from error

    def clear(self) -> None:
        """Cancel all jobs, and wait until every node is free."""
        self._cancel_all()
        self.wait_until_idle(2 * STEP_SECONDS)

    def wait_until_empty(self, node: int, seconds: float = 2 * STEP_SECONDS) -> None:
        """Until nothing but slurmd runs on a node; the error names what is left."""
        wait_for(
            f"node{node} to be empty",
            lambda: len(self.processes(node)) == 1,
            seconds,
            missing=lambda: "\n".join([*self.commands(f"node{node}"), *tail(self.root / f"log/node{node}.out", 20)]),
        )

    def start_controller(self) -> None:
        """Start slurmctld, which goes on with the jobs that it knew."""
        self._boot("slurmctld", self._at_controller(["slurmctld", "-D"]))

    def stop_controller(self) -> None:
        """End slurmctld, which saves what it knows: nothing is queued and nobody is answered."""
        self._machines.pop("slurmctld").shut_down()

    def start_node(self, node: int) -> None:
        """Start a node's slurmd; returns before it is idle."""
        self._boot(f"node{node}", self.on_node(node, ["slurmd", "-D", "-N", f"node{node}"]))

    def lose_node(self, node: int) -> None:
        """End slurmd and everything that its jobs run, at one moment, as when a machine loses power.

        Only its peers' connections are reset at once, where a lost machine would be silent: an srun that is just
        writing to it dies of SIGPIPE. `NetworkedCluster` is silent.
        """
        self._machines.pop(f"node{node}").power_off()

    def processes(self, node: int) -> list[int]:
        """The pids of all that runs on a node, slurmd first unless it crashed."""
        return self._machines[f"node{node}"].processes()

    def commands(self, machine: str) -> list[str]:
        """What runs on a machine, such as `node0`, as `pid state command`, its daemon first."""
        found = []
        for pid in self._machines[machine].processes():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found.append(f"{pid} {process.status()} {' '.join(process.cmdline())}")
        return found

    def describe(self) -> str:
        """What a failure needs: the nodes, the jobs, what runs on each node, and the last lines of each daemon."""
        lines = []
        for argv in (("sinfo", "-N", "-p", "low", "-o", "%N %T %E"), ("squeue", "--long", "--states=all")):
            try:
                lines += self.run(*argv, seconds=10).splitlines()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                lines.append(str(error))
        for name in self._machines:
            lines += [f"--- {name}", *self.commands(name)]
            output = tail(self.root / f"log/{name}.out", 200)
            lines += [line for line in output if not line.startswith(DAEMONS)]  # such as malloc's last words
            lines += tail(self.root / f"log/{name}.log", LOG_LINES)
        return "\n".join(["", *lines])

    def processes_left(self) -> list[str]:
        """Every process of this machine that was given this Slurm, as `pid command`; commands of tests too."""
        mark, found = f"SLURM_CONF={self.env['SLURM_CONF']}\0".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes() + b"\0":
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
            except OSError:
                continue  # it ended, or is another user's
        return found

    def _configure(self) -> None:
        for folder in ("log", "state", "munge"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "munge").chmod(0o755)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.root / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n")
        nodes = [
            f"NodeName=node{node} {self._node_address(node)} CPUs=8 RealMemory=8000 Gres=gpu:2"
            for node in range(self.nodes)
        ]
        user = self.run("id", "--user", "--name")
        text = CONFIG.format(
            controller=self._controller_address(),
            user=user,
            root=self.root,
            kill_wait=self._kill_wait,
            nodes="\n".join(nodes),
        )
        (self.root / "slurm.conf").write_text(text)
        # slurmd loads a cgroup plugin even if it uses none, and that of v2 needs a running D-Bus.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _controller_address(self) -> str:
        return f"SlurmctldHost={_host()}(127.0.0.1)\nSlurmctldPort={self._port()}"

    def _node_address(self, node: int) -> str:
        return f"NodeHostname={_host()} NodeAddr=127.0.0.1 Port={self._port()}"

    def _at_controller(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def _munged(self) -> list[str]:
        files = {"key-file": "munge.key", "socket": "munge/socket", "pid-file": "munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "munged.seed"}
        # A temporary folder is not as private as munged wants it: --force.
        return ["munged", "--foreground", "--force", *(f"--{name}={self.root / file}" for name, file in files.items())]

    def _boot(self, name: str, argv: Sequence[str]) -> None:
        assert name not in self._machines, f"{name} is running"
        self._machines[name] = Machine(argv, self.root / f"log/{name}.out", self.env)

    def _port(self) -> int:
        """A port that stays free for the daemon that gets it, also between its lives.

        Slurm's daemons listen with SO_REUSEADDR, so this holder allows that; `hold_port` would keep them out."""
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holder.bind(("", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._ports.append(holder)
        return int(self._ports[-1].getsockname()[1])

    def _is_idle(self) -> bool:
        try:
            states = self.node_states()
        except AssertionError:
            return False  # the controller does not answer yet
        return list(states.values()) == ["idle"] * self.nodes

    def _wait_for(
        self, job: str, become: str, has: Callable[[Mapping[str, str]], bool], seconds: float
    ) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            fields = self.job(job)
            if not has(fields) and fields["JobState"] in ENDED:
                raise AssertionError(f"job {job} became {fields['JobState']} ({fields['Reason']}): it did not {become}")
            return fields if has(fields) else None

        return wait_for(f"job {job} to {become}", reached, seconds, missing=lambda: self.run("squeue", "--long"))

    def _cancel_all(self) -> None:
        """So that commands which wait for jobs end; the processes are ended anyway."""
        try:
            self.run("scancel", "--quiet", f"--user={os.getuid()}", seconds=10)
        except (AssertionError, subprocess.TimeoutExpired):
            return  # the controller does not answer


def _host() -> str:
    """The name by which slurmctld recognises its own machine."""
    return socket.gethostname().partition(".")[0]
