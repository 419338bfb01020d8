"""A Slurm whose nodes are on a network of their own, which a test can cut.

Owns one network namespace for the controller and the users (`head`), with a bridge, and one a node, with its own
address and hostname on that bridge. Promises that nothing of it is seen outside and that all of it goes away with the
processes: a namespace is held by an open file of this process and by what runs in it. There is no way out of this
network. Needs root, or its capabilities in a user namespace: `unshare --user --map-current-user --keep-caps make test`.

    with NetworkedCluster(tmp_path) as slurm:
        slurm.cut(2)         # node2 goes on, but reaches nobody: a zombie
        slurm.heal(2)
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.utils.waiting import wait_for
from tests.cluster.slurm_cluster import SEARCH, SlurmCluster

HEAD = "10.11.0.1"
TOOLS = ("ip", "nsenter", "unshare", "mount")


def why_no_networks() -> str:
    """Why this machine permits no namespaces, as a sentence; empty if it does."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]:
        return f"no {', '.join(missing)} here: apt-get install iproute2 util-linux"
    # The same kinds that the cluster makes; a mount inside is what containers forbid most often.
    trial = [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "sh",
        "-c",
        "ip link add probe type bridge && mount --bind /tmp /mnt",
    ]
    search = {**os.environ, "PATH": SEARCH}
    done = subprocess.run(trial, env=search, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode == 0:
        return ""
    hint = "be root, or run the tests under: unshare --user --map-current-user --keep-caps"
    return f"network namespaces are not permitted here ({done.stderr.strip()}); {hint}"


class NetworkedCluster(SlurmCluster):
    """See the module. `env` alone does not reach this Slurm: commands go through `run` or `wrap`."""

    def __init__(self, root: Path, *, nodes: int = 4, kill_wait: int = 30) -> None:
        super().__init__(root, nodes=nodes, kill_wait=kill_wait)
        self._namespaces: dict[str, int] = {}

    def __enter__(self) -> "NetworkedCluster":
        try:
            self._build()
            super().__enter__()
        except BaseException:
            self._release()
            raise
        return self

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._release()

    def address(self, node: int) -> str:
        """The only address of a node."""
        return f"10.11.0.{node + 10}"

    def cut(self, node: int) -> None:
        """Take the node off the network; what runs there goes on and reaches itself only."""
        self._ip("head", f"link set to-node{node} down")

    def heal(self, node: int) -> None:
        """Put the node back on the network."""
        self._ip("head", f"link set to-node{node} up")

    def lose_node(self, node: int) -> None:
        """End all that runs on the node at one moment; to its peers it falls silent."""
        self.cut(node)
        super().lose_node(node)

    def start_node(self, node: int) -> None:
        self.heal(node)
        super().start_node(node)

    def wrap(self, argv: Sequence[str]) -> list[str]:
        return [*self._enter("head"), *argv]

    def on_node(self, node: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a node, with its network, hostname and hosts file."""
        return self._as(f"node{node}", argv)

    def _build(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        names = [f"node{node}" for node in range(self.nodes)]
        for name in ("head", *names):
            # As Debian writes it: a machine's own name leads nowhere but to itself.
            (self.root / f"hosts.{name}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            self._namespaces[name] = _new_namespace()
            self._ip(name, "link set lo up")
        self._ip("head", "link add bridge0 type bridge")
        self._ip("head", f"address add {HEAD}/24 dev bridge0")
        self._ip("head", "link set bridge0 up")
        for node, name in enumerate(names):
            self._connect(name, self.address(node))

    def _connect(self, name: str, address: str) -> None:
        self._ip("head", f"link add to-{name} type veth peer name eth0 netns {self._path(name)}")
        self._ip("head", f"link set to-{name} master bridge0 up")
        self._ip(name, f"address add {address}/24 dev eth0")
        self._ip(name, "link set eth0 up")

    def _controller_address(self) -> str:
        return f"SlurmctldHost=head({HEAD})"

    def _node_address(self, node: int) -> str:
        return f"NodeHostname=node{node} NodeAddr={self.address(node)}"

    def _at_controller(self, argv: Sequence[str]) -> list[str]:
        return self._as("head", argv)

    def _as(self, name: str, argv: Sequence[str]) -> list[str]:
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        shell = ["sh", "-c", become, name, str(self.root / f"hosts.{name}")]
        return [*self._enter(name), "unshare", "--uts", "--mount", *shell, *argv]

    def _path(self, name: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[name]}"

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", f"--net={self._path(name)}"]

    def _ip(self, name: str, words: str) -> None:
        argv = [*self._enter(name), "ip", *words.split()]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, f"{name}: ip {words}: {done.stderr.strip()}"

    def _release(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])


def _new_namespace() -> int:
    """An open file that holds a new network namespace."""
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as holder:
        theirs, ours = Path(f"/proc/{holder.pid}/ns/net"), Path("/proc/self/ns/net").readlink()
        wait_for("a network namespace", lambda: theirs.readlink() != ours, 20)
        return os.open(theirs, os.O_RDONLY)
