"""The entry point of all launchers: checks which code would be imported, and runs it.

Owns the check for foreign packages: `pipeline`, `slurm` and `conf` are common names, and another project's package may
come first in the search path. Promises a one-line error before any package is imported, and that text from outside
cannot control the terminal. Uses only the standard library.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("pipeline", "slurm", "conf")
INSTALLED = ("site-packages", "dist-packages")
CHECKOUT = Path(__file__).resolve().parent.parent


def run(module: str, usage: str = "") -> int:
    """Run `main(arguments)` of one of our modules. Returns its exit code. `--help` prints `usage` if it is set."""
    if usage and {"-h", "--help"} & set(sys.argv[1:]):
        print(usage)
        return 0
    wrong = namesake(CHECKOUT)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    try:
        with import_module("pipeline.utils.terminal").clean_output():
            code: int = import_module(module).main(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted; nothing was started", file=sys.stderr)
        return 130
    return code


def namesake(checkout: Path) -> str:
    """Why an import would load foreign or missing packages; empty if they are of this checkout, or installed."""
    install = f"{sys.executable} -m pip install -e {checkout}"
    folders = {name: _folder(name) for name in PACKAGES}
    for name, folder in folders.items():
        if folder is None:
            return f"{name} is not installed in {sys.executable}: run make, or {install}"
        if folder != checkout and not (folder.name in INSTALLED and folder == folders["pipeline"]):
            return f"{name} is found in {folder}, which is not this project: run {install}, and see PYTHONPATH"
    return ""


def _folder(name: str) -> Path | None:
    """The folder that contains the package, which is not imported."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin or "").resolve().parent
