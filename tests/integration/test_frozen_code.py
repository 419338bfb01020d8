"""A run goes on with the code that it was submitted with, whatever becomes of the checkout."""

import shutil
from pathlib import Path

import pytest

import pipeline
from slurm.registry.code_snapshot import PACKAGES
from tests.support.python import run_python

pytestmark = pytest.mark.integration

LAUNCHER = """
import subprocess, sys
from slurm.registry import run_registry as runs
from slurm.submission.compose_config import compose_config
from slurm.scheduler.scheduler_registry import child_environment
from slurm.batch.executors import LocalNodesExecutor
from tests.patience import WAIT_SECONDS
from pipeline.utils.waiting import wait_for

SEEN = "from pipeline import errors; import slurm; print(errors.EDITION, errors.__file__, slurm.__file__)"

def seen():  # by an agent, and by a role that it starts
    from pipeline import errors
    import slurm
    role = subprocess.run([sys.executable, "-P", "-c", SEEN], env=child_environment({}), capture_output=True, text=True)
    return f"{errors.EDITION} {errors.__file__} {slurm.__file__}", role.stdout.strip() or role.stderr

with runs.claimed_run(compose_config(["experiment=demo", f"output={sys.argv[1]}"])) as paths:
    (paths.attempts / "local-0").mkdir(parents=True, exist_ok=True)  # as an agent does
    job = LocalNodesExecutor(paths, 1).submit(seen)
    wait_for("the attempt to end", job.done, WAIT_SECONDS)
    from pipeline import errors
    print(errors.EDITION, *job.task(0).result(), sep="\\n")
"""


REFUSED = """
import sys
from slurm.registry import run_registry as runs
from slurm.submission.compose_config import compose_config

try:
    with runs.claimed_run(compose_config(["experiment=demo", f"output={sys.argv[1]}"])) as paths:
        raise ValueError("the scheduler refused the job")
except ValueError:
    print((paths.code / "pipeline" / "errors.py").read_text().splitlines()[-1], runs.identity(paths).run_id)
"""
WARNINGS = """
import sys
from slurm.submission.compose_config import compose_config
from slurm.submission.submission_warnings import warnings_of

print(*warnings_of(compose_config(["experiment=demo", f"output={sys.argv[1]}"])), sep="\\n")
"""


def copied_checkout(folder: Path) -> Path:
    for package in PACKAGES:
        source = Path(pipeline.__file__).parent.parent / package
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_an_edit_after_a_submission_that_started_nothing_is_what_the_next_one_takes(tmp_path: Path) -> None:
    checkout, runs = copied_checkout(tmp_path / "checkout"), tmp_path / "runs"
    (tmp_path / "refused.py").write_text(REFUSED)
    names = set()
    for edition in ("first", "second"):
        with (checkout / "pipeline" / "errors.py").open("a") as module:
            module.write(f"# {edition}\n")
        code, name = run_python(str(checkout), tmp_path / "refused.py", runs).rsplit(maxsplit=1)
        assert code == f"# {edition}"
        names.add(name)
    assert len(names) == 1, "it is the same run"


def test_an_edit_of_the_checkout_between_two_attempts_does_not_reach_the_run(tmp_path: Path) -> None:
    checkout, runs = copied_checkout(tmp_path / "checkout"), tmp_path / "runs"
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "warnings.py").write_text(WARNINGS)
    frozen = runs / "demo" / "code"
    in_the_run = f"first {frozen / 'pipeline' / 'errors.py'} {frozen / 'slurm' / '__init__.py'}"
    module = checkout / "pipeline" / "errors.py"
    text = module.read_text()
    for edition in ("first", "second"):
        module.write_text(f'{text}\nEDITION = "{edition}"\n')
        if edition == "second":
            (checkout / "conf" / "new.yaml").write_text("{}")
        warned = run_python(str(checkout), tmp_path / "warnings.py", runs)
        about = f"{module} changed since the run was created, which continues with its own"
        assert (about in warned) == (edition == "second"), warned
        assert "new.yaml" not in warned, "the run reads its frozen config"
        assert attempt_from(checkout, tmp_path / "launcher.py", runs) == [edition, in_the_run, in_the_run]


def attempt_from(checkout: Path, launcher: Path, runs: Path) -> list[str]:
    """What the launcher, an agent and a role of one attempt run."""
    return run_python(str(checkout), launcher, runs).splitlines()
