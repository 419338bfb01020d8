"""Attaching servers to a running run.

Owns the submission of an attached job: servers that join a running run, as a separate job in the queue, or on this
machine below the launcher. Promises that nothing is started unless the run can use the servers, and that the run's own
job is never touched. `slurm.agent.attached_agent` is what the job executes.

    python launchers/attach.py run=<name or directory> servers=2 [nodes=1] [--dry-run] [cluster.<key>=<value> …]
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import RunConfig, load_config
from pipeline.config.cross_checks import check_queue_keys
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import ConfigError, RollcallError, RunStateError
from pipeline.observability.run_history import find_run
from pipeline.run.completion import is_finished
from pipeline.run.paths import AttachedPaths, RunPaths
from pipeline.run.run_documents import LOCAL
from pipeline.topology.assignment import describe_plan
from pipeline.topology.plan import Plan, make_servers_plan
from pipeline.utils.user_commands import user_command
from pipeline.utils.waiting import CLOCK
from slurm.agent.attached_agent import AttachedAgent
from slurm.batch.executors import BatchExecutor, LocalNodesExecutor
from slurm.batch.site_checks import check_site
from slurm.registry import attached_jobs, run_registry
from slurm.scheduler.scheduler_protocol import Connect, JobQueue
from slurm.scheduler.scheduler_registry import batch_scheduler, connect_scheduler
from slurm.submission.compose_config import compose_over
from slurm.submission.launcher_signals import recorded_signals
from slurm.submission.local_job import refuse_lacking_gpus
from slurm.submission.tail_job import run_title

MAX_SERVERS = 1024
"""Largest number of servers of one attached job."""
_ENTRANCE = "slurm/agent/attached_agent.py"
_PAUSE = 0.1


@dataclass(frozen=True)
class Request:
    """The arguments of `attach.py`.

    Attributes:
        nodes: nodes that share the servers evenly; 0: as many as needed with the run's number of servers per node.
        overrides: `cluster.<key>=<value>`, for this job only.
    """

    run: RunPaths
    servers: int
    nodes: int
    overrides: tuple[str, ...]
    dry_run: bool


def main(arguments: Sequence[str]) -> int:
    """Attach servers. Returns 0, 1 if they failed, or 2 for a wrong argument."""
    try:
        request = read_request(arguments)
        with recorded_signals() as interrupted:
            return attach(request, connect_scheduler, interrupted)
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def read_request(arguments: Sequence[str]) -> Request:
    """The request of a command line; `ConfigError` for the first mistake."""
    ours, rest, options = dict[str, str](), list[str](), list[str]()
    for text in arguments:
        key, _, value = text.partition("=")
        target = options if text.startswith("-") else rest
        if key in ("run", "servers", "nodes"):
            ours[key] = value
        else:
            target.append(text)
    if unknown := [option for option in options if option != "--dry-run"]:
        raise ConfigError("option", unknown[0], "--dry-run", "see --help")
    for text in rest:
        key = text.partition("=")[0]
        if not key.startswith("cluster.") or key == "cluster.scheduler":
            expected = "run=, servers=, nodes= or a key of the job, such as cluster.partition="
            raise ConfigError(key, text, expected, "all else is that of the run, whose weights the servers get")
    if "run" not in ours:
        raise ConfigError("run", "", "the name or directory of a running run", "run=demo")
    servers, nodes = _number(ours, "servers", "0"), _number(ours, "nodes", "0")
    if not 1 <= servers <= MAX_SERVERS:
        raise ConfigError("servers", ours.get("servers", ""), f"a number from 1 to {MAX_SERVERS}", "servers=2")
    return Request(RunPaths(find_run([f"run={ours['run']}"])), servers, nodes, tuple(rest), bool(options))


def _number(ours: Mapping[str, str], key: str, default: str) -> int:
    text = ours.get(key, default)
    if not text.isdecimal():
        raise ConfigError(key, text, "a whole number", f"{key}=2")
    return int(text)


def attach(request: Request, connect: Connect, interrupted: Sequence[object] = ()) -> int:
    """Check, then start the attached job. Returns 0 once it is queued, or the code of a job on this machine."""
    run = request.run
    served = running_config(run, connect)
    number = attached_jobs.next_number(run)
    config = attached_config(served, number, request)
    plan = make_servers_plan(config, first := attached_jobs.first_index(run, number))
    if config.cluster.on_this_machine:
        refuse_lacking_gpus(plan)
        queue = None
    else:
        queue = connect(config.cluster.scheduler)
        text = _executor(AttachedPaths(run.attached / str(number)), config, plan, queue, "????").batch_file()
        check_site(config, plan, queue, text)
    _print_plan(run, number, plan)
    if request.dry_run:
        print(f"\n{text}" if queue is not None else "", end="", flush=True)
        return 0
    job = attached_jobs.create_attached(run, number, config)
    agent = AttachedAgent(job.root, first)
    if queue is None:
        return _run_here(job, plan, agent, interrupted)
    submitted = _executor(job, config, plan, queue, run_registry.identity(job).run_id).submit(agent)
    try:
        run_registry.record_job(job, config.cluster.scheduler, submitted.job_id)
    except BaseException:
        submitted.cancel()
        raise
    print(f"submitted job {submitted.job_id}")
    print(f"  watch       {user_command('watch')} run={run_title(run.root)}")
    print(f"  detach      {user_command('detach')} run={run_title(run.root)} job={number}", flush=True)
    return 0


def running_config(run: RunPaths, connect: Connect) -> RunConfig:
    """The frozen config of a run that servers can join now; `RunStateError` or `ConfigError` if they cannot."""
    name, config = run.root.name, read_frozen_config(run)
    if config is None:
        raise RunStateError("run", name, f"a readable {run.config}", "submit the run again")
    if not config.has_rollouts or config.serve.enabled or config.evaluation.only:
        raise ConfigError("run", name, "a run that trains by RL", "other runs have a fixed number of servers")
    if is_finished(run):
        raise RunStateError("run", name, "a run that is not finished", f"see {run.report}")
    live = run_registry.is_live_here(run)
    if not config.cluster.on_this_machine:
        live = run_registry.live_job(run, connect(config.cluster.scheduler)) is not None
    if not live:
        hint = "submit it first, with the command that started it"
        raise RunStateError("run", name, "a run whose job is queued or runs", hint)
    if not (run.code / _ENTRANCE).exists():
        raise RunStateError("run", name, f"a run whose code has {_ENTRANCE}", "its code is older than attached servers")
    return config


def attached_config(served: RunConfig, number: int, request: Request) -> RunConfig:
    """The config of an attached job: that of the run, with servers only, and with the user's cluster keys."""
    config = load_config(compose_over(served.model_dump(mode="json"), request.overrides))
    check_queue_keys(config)
    per_node = min(request.servers, _servers_per_node(served))
    nodes = request.nodes or -(-request.servers // per_node)
    if request.servers % nodes:
        expected = f"a multiple of {nodes}, the number of nodes"
        raise ConfigError("servers", request.servers, expected, "set nodes=, or attach two jobs")
    inference = served.resources.inference.model_copy(update={"nodes": nodes, "servers": request.servers // nodes})
    alone = {"inference": inference, "nodes": 0, "spare_nodes": 0, "colocate": False, "hetjob": False}
    resources = served.resources.model_copy(update=alone)
    name = f"{served.name[:40]}-attached-{number}"
    return config.model_copy(update={"name": name, "resources": resources, "faults": ()})


def _servers_per_node(served: RunConfig) -> int:
    """Servers on a full node: as the run's own, or as many as fit on `resources.gpus_per_node`."""
    resources = served.resources
    if resources.gpus_per_node and resources.inference.gpus:
        fitting = resources.gpus_per_node // resources.inference.gpus
        return max(1, fitting * resources.inference.servers_per_gpu)
    return resources.inference.servers


def _executor(job: AttachedPaths, config: RunConfig, plan: Plan, queue: JobQueue, run_id: str) -> BatchExecutor:
    scheduler = batch_scheduler(config.cluster.scheduler)
    return BatchExecutor(job, config, plan, run_id=run_id, scheduler=scheduler, queue=queue)


def _print_plan(run: RunPaths, number: int, plan: Plan) -> None:
    print(f"{run.root.name}: attached job {number}")
    for line in describe_plan(plan):
        print(f"  {line}", flush=True)


def _run_here(job: AttachedPaths, plan: Plan, agent: AttachedAgent, interrupted: Sequence[object]) -> int:
    """Run the job below this process until the servers leave; a first signal makes them leave, a second kills them."""
    executor = LocalNodesExecutor(job, plan.ranks)
    run_registry.record_job(job, LOCAL, executor.job_name)
    handle = executor.submit(agent)
    print("attached; Ctrl-C detaches", flush=True)
    is_leaving = False
    while executor.code is None and len(interrupted) < 2:
        if interrupted and not is_leaving:
            is_leaving = True
            handle.cancel()
        CLOCK.sleep(_PAUSE)
    if executor.code is None:
        executor.kill()
    attached_jobs.mark_ended(job)
    print(f"{attached_jobs.title(job)}: over", flush=True)
    return 1 if executor.code and not interrupted else 0
