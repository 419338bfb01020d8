"""The keys of where a run goes: the cluster that it asks, and what each role gets of it."""

from typing import Literal

from pydantic import ConfigDict, Field

from pipeline.config.values import Memory, Network, NotNegative, Positive, Seconds, Section, SlurmTime


class ServicesComponent(Section):
    """The CPU component of a heterogeneous job (`resources.layout=het`), where it differs from the other."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    partition: str = Field("", description="Its partition; empty: `cluster.partition`.")
    constraint: str = Field("", description="Features that its nodes must have.")
    cpus: NotNegative = Field(0, description="CPUs of each of its nodes; 0: as many as its roles need.")
    memory: Memory = Field("", description="Memory of each of its nodes, as `16G`; empty: the partition's default.")


class ClusterConfig(Section):
    """Where the job runs and how long its agents wait. All but the `_seconds` of agents is for Slurm alone."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # `cluster.memory=0`, `cluster.account=4711`

    kind: Literal["local", "slurm"] = Field(
        description="Where the job runs. `local`: virtual nodes on this machine; `slurm`: one Slurm job."
    )
    rendezvous_seconds: Seconds = Field(
        60, description="Deadline for all ranks to meet and for the world to be published."
    )
    startup_seconds: Seconds = Field(240, description="Deadline for a role to become ready after its process started.")
    silence_seconds: Seconds = Field(
        180,
        description="Time without a sign of life after which a role that is ready counts as hung; what may take longer "
        "says so itself.",
    )
    stop_seconds: Seconds = Field(
        6, description="Time between asking a role to stop (INT) and ending its group (KILL)."
    )
    grace_seconds: Seconds = Field(
        25, description="Time the trainer has to commit when the job is told to stop, or something else failed."
    )
    late_seconds: NotNegative = Field(
        90,
        description="How late a file that another node made may appear on the shared filesystem: NFS clients remember "
        "a folder for up to 60 s. 0 where all nodes see it at once. Waits that decide a job's end allow for it.",
    )
    partition: str = Field("", description="Slurm partition; empty: the site's default.")
    account: str = Field("", description="Account that is charged; empty: your default.")
    qos: str = Field("", description="Quality of service.")
    time: SlurmTime = Field(
        "", description="Time limit of one attempt, as `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; empty: the partition's."
    )
    constraint: str = Field("", description="Features that the nodes must have.")
    exclude: str = Field("", description="Nodes that the job must not get, as `node[3,7-9]`.")
    nodelist: str = Field("", description="Nodes that the job must get.")
    network: Network = Field(
        "",
        description="Interface (`ib0`) or subnet (`10.1.0.0/16`) that the ranks talk over; empty: the first address of "
        "each node that other nodes reach, its default route's before others.",
    )
    reservation: str = Field("", description="Reservation to run in.")
    exclusive: bool = Field(False, description="Whether nodes are shared with no other job.")
    gpu_type: str = Field("", description="Kind of GPU to ask for, as the site calls it (`h100`).")
    cpus: NotNegative = Field(0, description="CPUs of each node; 0: as many as its roles need.")
    memory: Memory = Field(
        "", description="Memory of each node, as `64G`, `0` for all; empty: the partition's default."
    )
    mail_user: str = Field("", description="Whom Slurm writes to.")
    mail_type: str = Field("", description="When it writes, as `END,FAIL`.")
    setup: tuple[str, ...] = Field((), description="Shell lines of the batch script before the agents start.")
    sbatch: dict[str, str | int | bool] = Field(
        default_factory=dict, description="Further options of sbatch, as `cluster.sbatch.licenses=matlab:1`."
    )
    srun_args: tuple[str, ...] = Field((), description="Further arguments of the srun that starts the agents.")
    services: ServicesComponent = ServicesComponent()
    notice_seconds: NotNegative = Field(
        120, description="How long before the time limit Slurm tells the agents (USR2); 0: never."
    )
    readable_by: Literal["owner", "group"] = Field(
        "owner",
        description="Who may read the run directory: `owner` gives it mode 0700, `group` 0750. Every submission sets "
        "the mode again. Files with secrets stay readable by their owner alone; see docs/security.md.",
    )
    max_jobs: NotNegative = Field(
        0,
        description="How many jobs of one sweep may be eligible to run at a time: each further one waits, in Slurm's "
        "queue, for the end of an earlier one (`--dependency=afterany`); 0: all of them.",
    )
    max_restarts: NotNegative = Field(100, description="How often one job may be requeued, by Slurm or by itself.")
    max_failures: Positive = Field(
        3, description="The job ends after so many attempts in a row that failed, or ran out of time, without a commit."
    )

    @property
    def directory_mode(self) -> int:
        """Permissions of the directory of a run or a sweep."""
        return 0o750 if self.readable_by == "group" else 0o700

    @property
    def lateness(self) -> float:
        """Seconds by which what one rank writes may be late for another: none where all are on one machine."""
        return 0.0 if self.kind == "local" else float(self.late_seconds)


class TrainerResources(Section):
    """Nodes of the trainer; one torchrun spans them."""

    nodes: Positive = Field(1, description="Nodes that train.")
    processes: Positive = Field(1, description="Trainer processes on each of its nodes.")
    gpus: NotNegative = Field(0, description="GPUs for each trainer process.")
    threads: Positive = Field(1, description="CPU threads for each trainer process.")


class InferenceResources(Section):
    """Nodes of the vLLM servers."""

    nodes: Positive = Field(1, description="Nodes that serve.")
    servers: Positive = Field(1, description="vLLM servers on each of its nodes.")
    gpus: NotNegative = Field(0, description="GPUs for each server.")
    per_gpu: Positive = Field(
        1,
        description="Servers of one GPU that share it, each with its part of inference.gpu_memory: two engines feed "
        "one GPU a small model faster than one does.",
    )
    threads: Positive = Field(1, description="CPU threads for each server.")


class ServiceResources(Section):
    """Nodes of Redis, the actor and the preprocessor."""

    nodes: NotNegative = Field(1, le=1, description="1: a node of their own; 0: beside the least loaded other role.")


class ResourcesConfig(Section):
    """How many nodes each kind of role gets."""

    trainer: TrainerResources = TrainerResources()
    inference: InferenceResources = InferenceResources()
    services: ServiceResources = ServiceResources()
    spares: NotNegative = Field(0, description="Extra nodes that replace those whose preflight fails.")
    nodes: NotNegative = Field(0, description="Nodes of the allocation; 0: as many as the plan needs.")
    gpus_per_node: NotNegative = Field(
        0,
        description="GPUs of each node, onto which trainer and servers are packed together, in as few nodes as they "
        "fit, but each node of the trainer stays one; 0: each has nodes of its own.",
    )
    share_gpus: bool = Field(
        False,
        description="Servers on the GPUs of the trainer, for machines with one or few; inference.gpu_memory has to "
        "leave the trainer its part.",
    )
    gpu_memory: Memory = Field(
        "",
        description="Memory of each GPU, as `80G`: what does not fit is refused before anything starts; empty: it is "
        "not known. `--dry-run` shows what each role needs.",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="What trainer and servers compute on; with `cpu` GPUs are idle."
    )
    layout: Literal["one", "het"] = Field(
        "one", description="`one`: all nodes alike; `het`: a Slurm job of two components, services without GPUs."
    )
