"""The keys of the cluster and of the roles' resources, `cluster.*` and `resources.*`."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, Field

from pipeline.config.container_keys import ContainerConfig
from pipeline.config.value_types import Memory, Network, NotNegative, Positive, Seconds, Section, SlurmTime
from pipeline.run.run_documents import LOCAL

_SCHEDULERS = Path(__file__).parents[2] / "slurm" / "scheduler"
"""The folder of `slurm.scheduler`, which has a folder for each scheduler. Listed, never imported."""

if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(sorted(file.parent.name for file in _SCHEDULERS.glob("*/__init__.py")))]


class ServicesComponent(Section):
    """The CPU component of a heterogeneous job (`resources.hetjob=true`), if its settings differ."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    partition: str = Field("", description="Partition of this component; empty: `cluster.partition`.")
    constraint: str = Field("", description="Required features of its nodes.")
    cpus: NotNegative = Field(0, description="CPUs of each of its nodes; 0: the number that its roles need.")
    memory: Memory = Field(
        "", description="Memory of each of its nodes, such as `16G`; empty: the partition's default."
    )


class ClusterConfig(Section):
    """Scheduler, and timeouts of the agents. All keys except the agents' timeouts (`_seconds`) apply to Slurm only."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # `cluster.memory=0`, `cluster.account=4711`

    scheduler: SchedulerName = Field(
        description="Where the job runs. `local`: virtual nodes on this machine; `slurm`: one Slurm job."
    )
    rendezvous_seconds: Seconds = Field(
        60, description="Deadline for all ranks to meet and for the world to be published."
    )
    startup_seconds: Seconds = Field(
        240, description="Deadline for a role to become ready after its process has started."
    )
    heartbeat_seconds: Seconds = Field(
        180,
        description="Watchdog timeout: a ready role without a heartbeat for this long counts as hung. A role "
        "announces operations that may take longer.",
    )
    stop_seconds: Seconds = Field(
        6, description="Time between the request to stop a role (INT) and the end of its process group (KILL)."
    )
    grace_seconds: Seconds = Field(
        25, description="Time for the trainer to save a checkpoint when the job is stopped or another role has failed."
    )
    fs_visibility_seconds: NotNegative = Field(
        90,
        description="Longest delay until a file from another node is visible on the shared filesystem: NFS clients "
        "cache a folder for up to 60 s. 0 if all nodes see files at once. Waits that decide the end of a job "
        "include this delay.",
    )
    partition: str = Field("", description="Slurm partition; empty: the site's default.")
    account: str = Field("", description="Account to charge; empty: your default.")
    qos: str = Field("", description="Quality of service.")
    time: SlurmTime = Field(
        "",
        description="Time limit of one attempt, such as `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; empty: the partition's.",
    )
    constraint: str = Field("", description="Required node features.")
    exclude: str = Field("", description="Nodes to exclude, such as `node[3,7-9]`.")
    nodelist: str = Field("", description="Nodes to include.")
    network: Network = Field(
        "",
        description="Interface (`ib0`) or subnet (`10.1.0.0/16`) for the traffic between ranks; empty: the first "
        "address of each node that other nodes can reach, starting with the address of its default route.",
    )
    reservation: str = Field("", description="Reservation to run in.")
    exclusive: bool = Field(False, description="Do not share nodes with other jobs.")
    gpu_type: str = Field("", description="GPU type to request, by the site's name (`h100`).")
    cpus: NotNegative = Field(0, description="CPUs of each node; 0: the number that its roles need.")
    memory: Memory = Field(
        "", description="Memory of each node, such as `64G`, `0` for all; empty: the partition's default."
    )
    mail_user: str = Field("", description="Recipient of the scheduler's mail.")
    mail_type: str = Field("", description="Events that send mail, such as `END,FAIL`.")
    setup: tuple[str, ...] = Field((), description="Shell lines of the batch script before the agents start.")
    sbatch: dict[str, str | int | bool] = Field(
        default_factory=dict, description="Additional options of sbatch, such as `cluster.sbatch.licenses=matlab:1`."
    )
    srun_args: tuple[str, ...] = Field((), description="Additional arguments of the srun that starts the agents.")
    services: ServicesComponent = ServicesComponent()
    container: ContainerConfig = ContainerConfig()
    notice_seconds: NotNegative = Field(
        120, description="Time before the time limit at which the scheduler signals the agents (USR2); 0: never."
    )
    readable_by: Literal["owner", "group"] = Field(
        "owner",
        description="Readers of the run directory: `owner` sets mode 0700, `group` 0750. Every submission sets the "
        "mode again. Files with secrets stay readable by their owner alone; see docs/security.md.",
    )
    compile_cache: str = Field(
        "",
        description="Directory on a file system of all nodes for compiled code (torch, Triton, the inference engine), "
        "so that a requeue on other nodes compiles nothing again. Empty: `~/.cache`, which the nodes of most clusters "
        "share; a private directory on each node if other users can write to the home directory.",
    )
    max_jobs: NotNegative = Field(
        0,
        description="Largest number of a sweep's jobs that are eligible to run at a time. Each further job waits in "
        "the queue for the end of an earlier one (`--dependency=afterany`). 0: no limit.",
    )
    max_restarts: NotNegative = Field(
        100, description="Largest number of requeues of one job, by the scheduler or by the job itself."
    )
    max_failures: Positive = Field(
        3,
        description="The job ends after this many consecutive attempts that failed or timed out without a checkpoint.",
    )

    @property
    def directory_mode(self) -> int:
        """Permissions of a run's or a sweep's directory."""
        return 0o750 if self.readable_by == "group" else 0o700

    @property
    def on_this_machine(self) -> bool:
        """Whether the job runs on this machine, as child processes of its launcher. Otherwise a scheduler queues it."""
        return self.scheduler == LOCAL

    @property
    def lateness(self) -> float:
        """Maximum delay in seconds until a rank's file is visible to other ranks; 0 on one machine."""
        return 0.0 if self.on_this_machine else float(self.fs_visibility_seconds)


class TrainerResources(Section):
    """Nodes of the trainer; one torchrun spans them."""

    nodes: Positive = Field(1, description="Nodes that train.")
    processes: Positive = Field(1, description="Trainer processes on each trainer node.")
    gpus: NotNegative = Field(0, description="GPUs for each trainer process.")
    threads: Positive = Field(1, description="CPU threads for each trainer process.")


class InferenceResources(Section):
    """Nodes of the inference servers."""

    nodes: Positive = Field(1, description="Nodes that serve.")
    servers: Positive = Field(1, description="Servers on each inference node.")
    gpus: NotNegative = Field(0, description="GPUs for each server.")
    servers_per_gpu: Positive = Field(
        1,
        description="Servers that share one GPU, each with its part of inference.gpu_memory: two engines keep a GPU "
        "busier with a small model than one.",
    )
    threads: Positive = Field(1, description="CPU threads for each server.")


class ServiceResources(Section):
    """Nodes of Redis, the actor and the preprocessor."""

    nodes: NotNegative = Field(1, le=1, description="1: a separate node; 0: on the least loaded node of another role.")


class ResourcesConfig(Section):
    """Nodes and devices of the roles."""

    trainer: TrainerResources = TrainerResources()
    inference: InferenceResources = InferenceResources()
    services: ServiceResources = ServiceResources()
    spare_nodes: NotNegative = Field(
        0, description="Spare nodes, which replace nodes with a failed preflight check, and nodes that are lost."
    )
    nodes: NotNegative = Field(0, description="Nodes of the allocation; 0: the number that the plan needs.")
    gpus_per_node: NotNegative = Field(
        0,
        description="GPUs of each node. Trainer and servers are packed onto as few nodes as possible; the number of "
        "trainer nodes is kept. 0: trainer and servers have separate nodes.",
    )
    colocate: bool = Field(
        False,
        description="Colocate the servers on the trainer's GPUs, for machines with one or few GPUs; "
        "inference.gpu_memory must leave enough memory for the trainer.",
    )
    mps: bool = Field(
        False,
        description="Start NVIDIA's Multi-Process Service on nodes whose GPUs several roles share, so that their "
        "kernels run at once; docs/gpus.md#multi-process-service.",
    )
    gpu_memory: Memory = Field(
        "",
        description="Memory of each GPU, such as `80G`: a plan that does not fit is refused before anything starts; "
        "empty: unknown. `--dry-run` prints the memory of each role.",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device of trainer and servers; with `cpu` GPUs stay idle."
    )
    hetjob: bool = Field(
        False,
        description="A heterogeneous Slurm job of two components, with services on nodes without GPUs. Otherwise all "
        "nodes are alike.",
    )

    @property
    def needs_mps(self) -> bool:
        """Whether nodes run the Multi-Process Service: `mps` has an effect only where roles share a GPU."""
        return self.mps and self.device == "cuda" and (self.colocate or self.inference.servers_per_gpu > 1)
