"""The copy of the code that every attempt of a run starts.

Owns which files it has, and their hashes. Promises that damage is noticed before anything is started, and that a copy
that was lost is made again from the same code only. The caller holds the run's lock.

    make(run, config)                           # a new run
    identity = RunIdentity(…, code=digest(run))
    refuse_damaged(run, known)                  # each later submission
    make(run, config, known.code)               # where the copy is gone
"""

import hashlib
import shutil
from pathlib import Path

import msgspec

import pipeline
from pipeline.checkpoints.run_progress import resume_options
from pipeline.config import RunConfig
from pipeline.environments import frozen_code
from pipeline.errors import CheckpointError, RunStateError
from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files

PACKAGES = ("pipeline", "slurm", "conf")
"""What an attempt runs from its snapshot."""
HASHES = ".hashes.json"
"""SHA-256 of each file of a snapshot, by its path there."""
_NAMED = 3


def snapshot_code(run: RunPaths, config: RunConfig, expected: str = "") -> None:
    """Copy the packages that this checkout runs, and the user's modules; a half copy of an earlier try is replaced.

    With an `expected` digest any other code is a `RunStateError`, and is not kept.
    """
    source = Path(pipeline.__file__).parent.parent
    part = run.code.with_name(f"{run.code.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(source / package, part / package, ignore=shutil.ignore_patterns("__pycache__"))
    frozen_code.copy_modules(frozen_code.modules_named_in(config), part)
    hashes = _hashes(part)
    if expected not in ("", _digest(hashes)):
        shutil.rmtree(part)
        raise RunStateError("resume", config.resume, f"the code that {run.root} was made with; {_ways_on(run)}")
    shared_files.write_document(part / HASHES, hashes)
    if run.code.exists():
        shutil.rmtree(run.code)
    part.rename(run.code)


def digest(run: RunPaths) -> str:
    """Of the snapshot that is there; empty if it has no hashes."""
    hashes = shared_files.read_document(run.code / HASHES, dict[str, str])
    return _digest(hashes) if hashes else ""


def refuse_damaged(run: RunPaths, known: RunIdentity) -> None:
    """Raise `CheckpointError` unless the snapshot is what was copied, or is gone and can be made again.

    Runs that were made before there were hashes are not looked at.
    """
    if not run.code.exists():
        if not known.code:
            raise CheckpointError(f"{run.code} is missing; {resume_options(run)}")
        return
    hashes = shared_files.read_document(run.code / HASHES, dict[str, str])
    if hashes is None and not known.code:
        return
    if damaged := _damaged(run.code, hashes):
        more = f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
        raise CheckpointError(
            f"{run.code} is damaged ({', '.join(damaged[:_NAMED])}{more}); restore these files, or remove the folder, "
            f"so that the same code is copied again, and {_ways_on(run)}"
        )


def _ways_on(run: RunPaths) -> str:
    known = shared_files.read_document(run.run, RunIdentity)
    made = known.revision if known else ""
    return (
        f"submit the run from the checkout it was made with{made and f' (revision {made})'}, or start over with "
        "resume=scratch"
    )


def _hashes(code: Path) -> dict[str, str]:
    found = sorted(path for path in code.rglob("*") if path.is_file())
    return {path.relative_to(code).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _digest(hashes: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(hashes)).hexdigest()


def _damaged(code: Path, hashes: dict[str, str] | None) -> list[str]:
    """The files that are missing or not what was copied. What is there besides is nobody's, such as compiled code."""
    if hashes is None:
        return [HASHES]
    return [name for name, wanted in hashes.items() if _hash_of(code / name) != wanted]


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
