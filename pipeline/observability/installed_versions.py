"""The versions of the software that this Python would import, without importing it."""

import ast
import platform
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pipeline

DRIVER = Path("/proc/driver/nvidia/version")


def describe_versions() -> str:
    """Python, this code, CUDA and its driver, and each installed distribution, one a line."""
    lines = [
        f"python {platform.python_version()} ({sys.executable})",
        f"platform {platform.platform()}",
        f"rollcall in {Path(pipeline.__file__).parent.parent}",
        f"torch's CUDA {_cuda_of_torch() or 'none'}",
        f"driver {_driver() or 'none'}",
        "",
    ]
    # The names of the folders: reading each package's metadata takes seconds on a shared disk.
    folders = (path for folder in sys.path for path in Path(folder).glob("*.dist-info"))
    names = {path.stem.replace("-", "==", 1) for path in folders}
    return "\n".join([*lines, *sorted(names, key=str.lower)])


def _cuda_of_torch() -> str:
    """The version of CUDA for which torch was built, from its file of versions: importing torch takes seconds."""
    spec = find_spec("torch")
    with suppress(OSError, SyntaxError, TypeError):
        for line in ast.parse(Path(spec.origin or "").with_name("version.py").read_text()).body:  # type: ignore[union-attr]
            if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
                target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
                if isinstance(target, ast.Name) and target.id == "cuda":
                    return str(line.value.value or "")
    return ""


def _driver() -> str:
    with suppress(OSError):
        return DRIVER.read_text().splitlines()[0]
    return ""
