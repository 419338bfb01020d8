"""The jobs that serve a run in addition to its own, below `attached/` in the run's directory.

Owns the directory of an attached job, which has the files of a run: an identity, a frozen config, the record of the
job, and a lock while it runs on this machine. So everything that submits, finds, locks or cancels a run's job does the
same with an attached one. Its code is the run's. Promises that two attached jobs have different numbers, and their
servers different indices. Must not know what an attached job does.
"""

import time
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.errors import RunStateError
from pipeline.run.completion import finish, is_finished
from pipeline.run.paths import ATTACHED, AttachedPaths, RunPaths
from pipeline.run.run_documents import Finished, RunIdentity
from pipeline.topology.plan import Plan, make_plan, make_servers_plan
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir
from slurm.registry import run_registry


def attached_jobs(run: RunPaths) -> list[AttachedPaths]:
    """All jobs that were attached to the run, by number."""
    numbers = sorted(int(name) for name in FileSharedDir(run.attached).names() if name.isdecimal())
    return [AttachedPaths(run.attached / str(number)) for number in numbers]


def unfinished_jobs(run: RunPaths) -> list[AttachedPaths]:
    """The attached jobs that are not on record as ended; only their scheduler or lock shows whether they are live."""
    return [job for job in attached_jobs(run) if not is_finished(job)]


def mark_ended(job: AttachedPaths) -> None:
    """Record that the job has ended and does not run again. Without the record, its scheduler is asked."""
    finish(job, Finished(time=time.time(), steps=0, attempt=""))


def paths_at(root: Path) -> RunPaths:
    """The paths of the run or the attached job in a directory."""
    is_attached = root.parent.name == ATTACHED and RunPaths(root.parent.parent).run.exists()
    return AttachedPaths(root) if is_attached else RunPaths(root)


def plan_of(run: RunPaths, config: RunConfig) -> Plan:
    """The plan of a run or an attached job with this config."""
    return make_servers_plan(config) if isinstance(run, AttachedPaths) else make_plan(config)


def title(run: RunPaths) -> str:
    """The name of a run, or of an attached job, in messages."""
    if isinstance(run, AttachedPaths):
        return f"{run.served.root.name}, attached job {run.number}"
    return run.root.name


def next_number(run: RunPaths) -> int:
    """The number of the next attached job."""
    return max((job.number for job in attached_jobs(run)), default=0) + 1


def create_attached(run: RunPaths, number: int, config: RunConfig) -> AttachedPaths:
    """Create the directory of an attached job; `RunStateError` if another command has just taken the number."""
    job = AttachedPaths(run.attached / str(number))
    try:
        job.root.mkdir(parents=True, mode=config.cluster.directory_mode)
    except FileExistsError:
        hint = "run the command again"
        raise RunStateError("run", run.root.name, f"no other command that attaches job {number}", hint) from None
    shared_files.write_document(job.config, _known_keys(config.model_dump(mode="json"), _tree(run)))
    # Not the run's id, by which a scheduler's jobs of the run are found.
    run_id = f"{run_registry.identity(run).run_id}.attached-{number}"
    shared_files.create_document(job.run, RunIdentity(run_id=run_id, created=time.time()))
    return job


def _known_keys(tree: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The tree without keys that the run's config lacks: the run's code may be older than this, and would refuse them.

    The keys of `cluster.sbatch` are the user's and stay.
    """
    return {
        key: _known_keys(value, known[key]) if isinstance(value, dict) and key != "sbatch" and known[key] else value
        for key, value in tree.items()
        if key in known
    }


def _tree(run: RunPaths) -> dict[str, Any]:
    return shared_files.read_document(run.config, dict[str, Any]) or {}


def first_index(run: RunPaths, number: int) -> int:
    """The index of the first server of an attached job: they follow those of the run and of the jobs attached before.

    Servers with equal indices would have equal names, and sample with equal seeds.
    """
    earlier = [job for job in attached_jobs(run) if job.number < number]
    return sum(_servers(other) for other in (run, *earlier))


def _servers(run: RunPaths) -> int:
    config = read_frozen_config(run)
    if config is None:
        raise RunStateError("run", run.root.name, f"a readable {run.config}", "the run cannot get more servers")
    return config.resources.inference.nodes * config.resources.inference.servers
