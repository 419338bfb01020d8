"""What a wheel of this project holds: `python -m tests.check_wheel`.

`pipeline` and `slurm` are names that other projects have on the package index too, so a wheel must carry exactly ours:
the three packages, `conf` with its files, no tests and no docs.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"conf", "pipeline", "slurm"}
MUST_HAVE = {
    "conf/config.yaml",
    "conf/models/tiny_qwen3/tokenizer.json",
    "pipeline/py.typed",
    "slurm/py.typed",
    "pipeline/config/schema.py",
    "slurm/agent/agent.py",
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "source"  # a build leaves files beside its source, which the next would take for its own
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(copy)]
        subprocess.run(command, check=True, timeout=300)
        names = zipfile.ZipFile(next(Path(folder).glob("*.whl"))).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    missing = MUST_HAVE - set(names)
    if top != TOP_LEVEL or missing:
        print(f"wrong wheel: top level {sorted(top)}, missing {sorted(missing)}", file=sys.stderr)
        return 1
    print(f"wheel: {len(names)} files below {', '.join(sorted(top))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
