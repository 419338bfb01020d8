"""What a wheel of this project holds, and that it works without the checkout: `python -m tests.check_wheel`.

`pipeline` and `slurm` are names that other projects have on the package index too, so a wheel must carry exactly ours:
the packages, `conf` with its files, the launchers behind the command `rollcall`, no tests and no docs. Its
command `rollcall` then checks and plans the demo in an empty folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"conf", "launchers", "pipeline", "slurm"}
MUST_HAVE = {
    "conf/config.yaml",
    "conf/models/tiny_qwen3/tokenizer.json",
    "pipeline/py.typed",
    "slurm/py.typed",
    "pipeline/config/schema.py",
    "slurm/agent/agent.py",
    "launchers/entry.py",
    "launchers/submit.py",
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "source"  # a build leaves files beside its source, which the next would take for its own
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(copy)]
        subprocess.run(command, check=True, timeout=300)
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        names = wheel.namelist()
        planned = plan_of_demo(wheel, Path(folder))
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    missing = MUST_HAVE - set(names)
    if top != TOP_LEVEL or missing:
        print(f"wrong wheel: top level {sorted(top)}, missing {sorted(missing)}", file=sys.stderr)
        return 1
    if planned.returncode or "demo" not in planned.stdout:
        print(f"the installed command fails: {planned.stdout}{planned.stderr}", file=sys.stderr)
        return 1
    print(f"wheel: {len(names)} files below {', '.join(sorted(top))}")
    return 0


def plan_of_demo(wheel: zipfile.ZipFile, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What `rollcall submit experiment=demo --dry-run` prints. The wheel's packages come before the checkout's."""
    site, work = folder / "site", folder / "work"
    wheel.extractall(site)
    work.mkdir()
    code = "import sys; sys.argv[0] = 'rollcall'; from launchers.entry import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "submit", "experiment=demo", "cluster=local", "--dry-run"]
    variables = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
