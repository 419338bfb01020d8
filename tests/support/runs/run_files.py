"""Every kind of file in a run directory whose content a program reads, and how it is read: for tests that damage them.

`RUN_FILES` has the function by which Rollcall itself reads each kind, and the consequence of an unreadable file.
`make_run` writes one of each with the real writers. `outcome` names what became of a read.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipeline.checkpoints import Fence, complete_checkpoints
from pipeline.checkpoints.run_progress import copy_identity, known_config, known_identity
from pipeline.checkpoints.sharded_state import load_shards
from pipeline.errors import DamagedCheckpointError, RollcallError
from pipeline.observability.run_history import read_attempt
from pipeline.roles.role_context import Status
from pipeline.run.completion import is_finished
from pipeline.run.events import Events
from pipeline.run.fault_moments import FaultRecord, FaultRecords
from pipeline.run.fault_plan import parse_faults
from pipeline.run.first_failure import FirstFailure
from pipeline.run.metrics_log import MetricSinks, read_rows
from pipeline.run.paths import AttemptPaths, RunPaths
from pipeline.run.run_documents import Finished, JobStateRecord, Outcome, RunIdentity, SubmittedJob
from pipeline.topology.plan import NodeInfo, World
from pipeline.transport.topic_segments import SegmentPosition, SegmentWriter, take_entries
from pipeline.utils import shared_files
from slurm.registry import code_snapshot, run_registry
from slurm.rendezvous.rank_meeting import LeaderClaim, Lease
from tests.support.runs.checkpoint_cases import commit, tensors

SHARD = "checkpoints/rl-50/1-0/__0_0.distcp"
Read = Callable[[RunPaths], Any]


@dataclass(frozen=True)
class RunFile:
    """A kind of file.

    Attributes:
        path: an example, relative to the run directory.
        read: reads it as Rollcall does; the result can be compared.
        consequence: of a file that cannot be read.
        fallback: the word for a read that gives the original content without this file.
        for_people: no decision depends on the content, and no checksum protects it.
    """

    path: str
    read: Read
    consequence: str
    fallback: str = "unchanged"
    for_people: bool = False


def attempt_of(run: RunPaths) -> AttemptPaths:
    return run.attempt("r-1", "1-0")


def document(kind: type) -> Callable[[str], Read]:
    """Reads a sealed document at a path below the run directory."""
    return lambda path: lambda run: shared_files.read_document(run.root / path, kind)


def sealed(path: str, kind: type, consequence: str) -> RunFile:
    return RunFile(path, document(kind)(path), consequence)


def read_checkpoint(run: RunPaths) -> tuple[int, float]:
    """The step and a number of the newest checkpoint that can be loaded, as the trainer looks for it."""
    for checkpoint in complete_checkpoints(str(run.checkpoints)):
        tree = tensors(0.0)
        try:
            checkpoint.state()
            load_shards(checkpoint, tree)
        except DamagedCheckpointError:
            continue
        assert torch.equal(tree["model"]["w"], torch.full((4, 3), float(checkpoint.manifest.step)))
        return checkpoint.manifest.step, float(tree["model"]["b"][0])
    raise AssertionError("no checkpoint at all")


def read_ancestry(run: RunPaths) -> list[str]:
    Fence(str(run.checkpoints), "1-0").check()
    return [checkpoint.name for checkpoint in complete_checkpoints(str(run.checkpoints))]


def read_code(run: RunPaths) -> bool:
    code_snapshot.refuse_damaged(run, RunIdentity(run_id="r-1", created=0.0, code="recorded"))
    return True


def read_segment(run: RunPaths) -> tuple[bytes, ...]:
    return tuple(frame.data for frame in take_entries(run.streams / "groups", SegmentPosition(1, 0), 100)[0])


_AGAIN = "as before it was written: its writer or the next attempt writes it again"
_OLDER = "the newest checkpoint that is whole counts, with a warning that names the file"
_ALONE = "the attempt waits for it until its deadline, whose error names it"
RUN_FILES = (
    RunFile("run.json", known_identity, "its copy next to the checkpoints counts", "restored"),
    RunFile(
        "config.json",
        lambda run: known_config(run, str(run.checkpoints)),
        "its copy next to the checkpoints counts",
        "restored",
    ),
    RunFile("job.json", run_registry.submitted_job, "no submission, until the file is removed"),
    RunFile("code/pipeline/errors.py", read_code, "no submission, until the file is restored"),
    RunFile("code/.hashes.json", read_code, "no submission, until the file is restored"),
    RunFile("finished.json", is_finished, "the run resumes from its last checkpoint and writes it again"),
    sealed("jobs/state-0.json", JobStateRecord, "as before the job's first checkpoint; its checkpoints count"),
    RunFile("checkpoints/RUN", known_identity, "run.json counts"),
    RunFile("checkpoints/CONFIG", lambda run: known_config(run, str(run.checkpoints)), "config.json counts"),
    RunFile("checkpoints/OWNER", read_ancestry, "no process writes or resumes, until a person decides"),
    RunFile("checkpoints/ancestry/1-0", read_ancestry, "no process writes or resumes, until a person decides"),
    *(
        RunFile(f"checkpoints/rl-50/1-0/{name}", read_checkpoint, _OLDER)
        for name in ("COMPLETE", "manifest.json", "state.msgpack", ".metadata", "__0_0.distcp")
    ),
    sealed("rendezvous/r-1/1-0/nodes/0.json", NodeInfo, _ALONE),
    sealed("rendezvous/r-1/1-0/claim-1.json", LeaderClaim, "the epoch is taken; without a lease the next one begins"),
    sealed("rendezvous/r-1/1-0/lease-1.json", Lease, "without a new beat another agent leads the next epoch"),
    sealed("rendezvous/r-1/1-0/world.json", World, _ALONE),
    RunFile(
        "attempts/1-0/events/1.json",
        lambda run: dict(Events(attempt_of(run)).read_all()),
        "its slot stays taken; agents that have not read it end with their roles",
    ),
    sealed("attempts/1-0/status/actor.0.json", Status, _AGAIN),
    sealed("attempts/1-0/first_failure.json", FirstFailure, "the event `failed` has the same line"),
    sealed("attempts/1-0/outcome.json", Outcome, "the count of failed attempts in a row begins again"),
    sealed("faults/kill%3Aredis%405s.json", FaultRecord, "the fault is not injected again, since its file exists"),
    RunFile("streams/groups/000000001.log", read_segment, "its entries before the damage count; a warning names it"),
    RunFile(
        "attempts/1-0/timeline/rank-0.jsonl",
        lambda run: read_attempt(attempt_of(run)).transitions,
        "lines that cannot be read are left out",
        for_people=True,
    ),
    RunFile(
        "metrics.jsonl", lambda run: tuple(map(str, read_rows(run.metrics))), "rows that cannot be read are left out",
        for_people=True,
    ),
)  # fmt: skip


def make_run(root: Path) -> RunPaths:
    """A run directory with one file of each kind, and two checkpoints."""
    run = RunPaths(root)
    paths = attempt_of(run)
    write = shared_files.write_document
    write(run.run, RunIdentity(run_id="r-1", created=1.0, revision="abc"))
    write(run.config, {"name": "demo", "seed": 7})
    write(run.job, SubmittedJob(kind="slurm", job="1", user="alice", host="login", time=1.0))
    write(run.finished, Finished(time=1.0, steps=50, attempt="1-0"))
    write(run.job_state("0"), JobStateRecord(root="s3://bucket", job="sft", done=3))
    file = run.code / "pipeline/errors.py"
    file.parent.mkdir(parents=True)
    file.write_text("MAX_LINE = 1000\n")
    write(run.code / code_snapshot.HASHES, {"pipeline/errors.py": hashlib.sha256(file.read_bytes()).hexdigest()})
    checkpoints = str(run.checkpoints)
    fence = Fence(checkpoints, "1-0")
    fence.claim()
    names = [commit(checkpoints, step).folder for step in (25, 50)]
    fence.keep(names)
    copy_identity(run, checkpoints)
    node = NodeInfo(
        rank=0, attempt="1-0", hostname="n", pid=1, boot="b", addresses=("10.0.0.1",), probe_port=1, ports=()
    )
    write(paths.rendezvous / "nodes/0.json", node)
    write(paths.rendezvous / "claim-1.json", LeaderClaim(epoch=1, rank=0, hostname="n", pid=1))
    write(paths.rendezvous / "lease-1.json", Lease(epoch=1, beat=2))
    write(paths.world, World(run_id="r-1", attempt="1-0", epoch=1, leader=0, secret="s", placements=()))
    Events(paths).publish("draining", "agent.0", "SIGTERM")
    write(paths.status("actor.0"), Status(state="ready", pid=1, time=1.0))
    write(
        paths.first_failure,
        FirstFailure(role="actor.0", rank=0, cause="killed by SIGKILL", exit_code=-9, time=1.0, log=""),
    )
    write(paths.outcome, Outcome(decision="requeued", reason="again", time=1.0, failures=2))
    FaultRecords(paths).begin(parse_faults(["kill:redis@5s"])[0], 1.0)
    writer = SegmentWriter(run.streams / "groups", 1 << 20)
    for number in range(5):
        writer.append([b"entry %d" % number * 4])
    writer.close()
    lines = [
        {"time": float(number), "role": "actor.0", "rank": 0, "state": "ready", "detail": ""} for number in range(4)
    ]
    paths.timeline.mkdir(parents=True)
    paths.timeline_of(0).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    with MetricSinks(run.metrics, "1-0", clock=lambda: 1.0) as sinks:
        for step in range(1, 5):
            sinks.log("train", "rl", step, {"loss": 0.5})
    return run


def outcome(file: RunFile, run: RunPaths, original: Any) -> str:
    """What became of a read of a damaged file, in a word. `AssertionError` if other content was used silently.

    `original` is the content of the whole file.
    """
    try:
        value = file.read(run)
    except RollcallError as error:
        # A loss of the ancestry's file is found by its folder.
        is_named = Path(file.path).name in str(error) or "ancestry" in str(error)
        return "refused" if is_named else f"an error without the file's name: {error}"
    if value == original:
        return file.fallback
    if not value:
        return "as if missing"
    if file.read is read_checkpoint and value == (25, -25.0):
        return "older one"
    if isinstance(value, tuple) and set(value) < set(original):
        return "part"
    assert file.for_people, f"{file.path}: {value} was used in the place of {original}"
    return "shown"
