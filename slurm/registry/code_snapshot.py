"""The copy of the code that every attempt of a run executes.

Owns the choice of its files, and their hashes. Promises that damage is detected before anything is started, and that a
lost copy is only created again from the same code. The caller holds the run's lock.

    snapshot_code(run, config)                  # a new run
    identity = RunIdentity(…, code=digest(run))
    refuse_damaged(run, known)                  # each later submission
    snapshot_code(run, config, known.code)      # if the copy is lost
"""

import hashlib
import shutil
from collections.abc import Mapping
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
"""The packages of a snapshot."""
HASHES = ".hashes.json"
"""The file with the SHA-256 of each file of a snapshot, by relative path."""
_NAMED = 3


def snapshot_code(run: RunPaths, config: RunConfig, expected: str = "") -> None:
    """Copy this checkout's packages and the user's modules; a partial copy of an earlier try is replaced.

    With an `expected` digest, different code is a `RunStateError` and leaves no copy.
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
        raise RunStateError("resume", config.resume, f"the code that {run.root} was made with; {_resume_hint(run)}")
    shared_files.write_document(part / HASHES, hashes)
    if run.code.exists():
        shutil.rmtree(run.code)
    part.rename(run.code)


def digest(run: RunPaths) -> str:
    """The digest of the run's snapshot; empty if it has no hashes."""
    hashes = shared_files.read_document(run.code / HASHES, dict[str, str])
    return _digest(hashes) if hashes else ""


def changed_files(run: RunPaths) -> list[Path]:
    """The files of this checkout and of the user that differ from the run's snapshot, also new ones; empty without a
    snapshot with hashes. Files of `conf` count only if the run may read them."""
    hashes = shared_files.read_document(run.code / HASHES, dict[str, str])
    if not hashes:
        return []
    source = Path(pipeline.__file__).parent.parent
    current = {path for package in PACKAGES for path in (source / package).rglob("*") if path.is_file()}
    names = {path.relative_to(source).as_posix() for path in current if "__pycache__" not in path.parts}
    names |= {name for name in hashes if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    read = [name for name in sorted(names) if _is_read(name, hashes)]
    changed = [source / name for name in read if _hash_of(source / name) != hashes.get(name)]
    return [*changed, *frozen_code.changed_modules(run.code)]


def _is_read(name: str, hashes: Mapping[str, str]) -> bool:
    """Whether an attempt may read this file. Of `conf` it reads models and data that were there at the submission; the
    YAML files are in the frozen config."""
    return not name.startswith("conf/") or (name in hashes and not name.endswith(".yaml"))


def refuse_damaged(run: RunPaths, known: RunIdentity) -> None:
    """Raise `CheckpointError` unless the snapshot is unchanged, or is lost and can be copied again.

    Snapshots of runs without recorded hashes are not checked.
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
            f"so that the same code is copied again, and {_resume_hint(run)}"
        )


def _resume_hint(run: RunPaths) -> str:
    known = shared_files.read_document(run.run, RunIdentity)
    made = known.revision if known else ""
    return (
        f"submit the run from the checkout it was made with{made and f' (revision {made})'}, or start over with "
        "resume=scratch"
    )


def _hashes(code: Path) -> dict[str, str]:
    files = sorted(path for path in code.rglob("*") if path.is_file())
    return {path.relative_to(code).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _digest(hashes: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(hashes)).hexdigest()


def _damaged(code: Path, hashes: dict[str, str] | None) -> list[str]:
    """The missing and changed files of a snapshot. Additional files, such as compiled code, are ignored."""
    if hashes is None:
        return [HASHES]
    return [name for name, expected in hashes.items() if _hash_of(code / name) != expected]


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""
