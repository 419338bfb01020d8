"""The nodes that a run asks a scheduler for.

Owns the translation of a plan into one or two groups of equal nodes, with their CPUs and GPUs. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import RunConfig
from pipeline.topology.plan import NodeBundle, Plan, RoleProcess

_AGENT_CPUS = 1


@dataclass(frozen=True)
class Component:
    """A part of the allocation with equal nodes: the whole allocation, or one component of a heterogeneous job.

    Attributes:
        nodes: the number of nodes, including spares.
        bundles: the node bundles of its roles; any node may get any bundle.
        partition: empty for the site's default; so are `constraint`, `memory` and `nodelist`.
        cpus: CPUs of each node, for its agent and roles.
        gpu_type: the type of its GPUs; empty for any.
    """

    nodes: int
    bundles: tuple[NodeBundle, ...]
    partition: str
    constraint: str
    memory: str
    cpus: int
    nodelist: str = ""
    gpu_type: str = ""

    @property
    def gpus(self) -> int:
        """The number of GPUs that each of its nodes must have."""
        return max((bundle.gpus for bundle in self.bundles), default=0)


def components(config: RunConfig, plan: Plan) -> tuple[Component, ...]:
    """The components of the allocation in rank order: one, or the services' followed by the others'."""
    cluster, resources = config.cluster, config.resources
    services, others = split_components(plan) if resources.hetjob else ((), plan.bundles)
    last = Component(
        nodes=plan.ranks - len(services),
        bundles=others,
        partition=cluster.partition,
        constraint=cluster.constraint,
        memory=cluster.memory,
        cpus=cluster.cpus or _max_cpus(others, config),
        nodelist=cluster.nodelist,
        gpu_type=cluster.gpu_type,
    )
    if not services:
        return (last,)
    own = cluster.services
    first = Component(
        nodes=len(services),
        bundles=services,
        partition=own.partition or cluster.partition,
        constraint=own.constraint,
        memory=own.memory,
        cpus=own.cpus or _max_cpus(services, config),
    )
    return first, last


def split_components(plan: Plan) -> tuple[tuple[NodeBundle, ...], tuple[NodeBundle, ...]]:
    """The node bundles of a heterogeneous job's first component, the services, and of its second."""
    services = tuple(bundle for bundle in plan.bundles if not any(_is_compute(process) for process in bundle.roles))
    return services, tuple(bundle for bundle in plan.bundles if bundle not in services)


def cpus_needed(bundle: NodeBundle, config: RunConfig) -> int:
    """CPUs for the roles of a node bundle, and one for its agent."""
    return _AGENT_CPUS + sum(_cpus(process, config) for process in bundle.roles)


def _is_compute(slot: RoleProcess) -> bool:
    return slot.role in ("trainer", "inference")


def _cpus(slot: RoleProcess, config: RunConfig) -> int:
    resources = config.resources
    if slot.role == "trainer":
        return resources.trainer.processes * resources.trainer.threads
    if slot.role == "actor":  # the actor mostly waits while the processes of its task compute
        return config.task.processes
    return resources.inference.threads if slot.role == "inference" else 1


def _max_cpus(bundles: Sequence[NodeBundle], config: RunConfig) -> int:
    return max(cpus_needed(bundle, config) for bundle in bundles)
