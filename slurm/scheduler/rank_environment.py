"""The environment of a rank: what its scheduler's variables describe.

Owns the value, in which no name of a variable occurs. The `repr` of an `Environment` shows the whole situation of a
rank.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pipeline.utils.fork_server import VARIABLE
from pipeline.utils.network_interfaces import addresses_on

COMMON_VARIABLES = ("PMI_", "PMI2_", "PMIX_", "SUBMITIT_", VARIABLE)
"""Prefixes of the variables by which any launcher describes a task, and of the address of an agent's fork server."""


@dataclass(frozen=True)
class Environment:
    """One rank of one attempt.

    Attributes:
        scheduler: the name of the scheduler that started the job.
        job, restart: the job id and its number of requeues. A heterogeneous job has its leader's id.
        rank, ranks: this task, and the number of tasks.
        addresses: candidate addresses of this node, best first.
        allocated: whether the scheduler allocated a node with its GPUs to this rank. Otherwise the rank is a virtual
            node, whose only address is its loopback address, and which claims the GPUs that it needs.
        interface: the address on which the probe server listens: a virtual node's address, or "" for all interfaces.
        visible_gpus: the scheduler's CUDA_VISIBLE_DEVICES, "" without a GPU. On one machine the user's value, None if
            it is not set.
    """

    scheduler: str
    job: str
    restart: int
    rank: int
    ranks: int
    addresses: tuple[str, ...]
    allocated: bool = True
    interface: str = ""
    visible_gpus: str | None = None

    def addresses_on(self, network: str) -> tuple[str, ...]:
        """The candidate addresses on `network` (`cluster.network`); a virtual node always has its loopback address."""
        return addresses_on(self.addresses, network) if self.allocated else self.addresses

    @property
    def attempt(self) -> str:
        """The name of the attempt, `<job id>-<restart count>`."""
        return f"{self.job}-{self.restart}"


def without_variables(variables: Mapping[str, str], prefixes: tuple[str, ...], exceptions: Set[str]) -> dict[str, str]:
    """The variables without those that begin with one of `prefixes`, except for the names in `exceptions`.

    A child would mistake inherited variables of a job for its own: a job that is submitted within another job its
    restart count and its shape, a library its number of tasks.
    """
    return {name: value for name, value in variables.items() if name in exceptions or not name.startswith(prefixes)}
