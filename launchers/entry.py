"""The entry point of all launchers: checks which code would be imported, and runs it.

    python launchers/watch.py run=demo    # in a checkout
    rollcall watch run=demo               # anywhere, with the package installed: the same

Owns the start of a command, and the check for foreign packages: `pipeline`, `slurm` and `conf` are common names, and
another project's package may come first in the search path. Promises a one-line error before any package is imported,
that text from outside cannot control the terminal, and that a terminal without a character gets `?` for it. Uses only
the standard library.
"""

import difflib
import inspect
import io
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PACKAGES = ("pipeline", "slurm", "conf")
INSTALLED = ("site-packages", "dist-packages")
CHECKOUT = Path(__file__).resolve().parent.parent
INSTALLER = "install"
"""The one script that runs before the project is installed."""


def main() -> int:
    """The command `rollcall`: `rollcall <command> …` runs the script `launchers/<command>.py`."""
    replace_unencodable()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == INSTALLER:
        code: int = script(INSTALLER).command(arguments)
        return code
    if name not in commands():
        near = difflib.get_close_matches(name, [*commands(), INSTALLER], n=1)
        hint = f"did you mean rollcall {near[0]}?" if near else "rollcall --help lists the commands"
        print(f"error: {name!r} is no command; {hint}", file=sys.stderr)
        return 2
    return run(name, arguments)


def run(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command with its arguments (by default those of this process). Returns its exit code.

    Its script names the module (`MODULE`) whose `main(arguments)` does the work. The script's docstring is its usage,
    unless the module parses `--help` with its other options (`HAS_OPTIONS`).
    """
    replace_unencodable()
    arguments = sys.argv[1:] if arguments is None else arguments
    command = script(name)
    if {"-h", "--help"} & set(arguments) and not getattr(command, "HAS_OPTIONS", False):
        print(usage(name))
        return 0
    if wrong := namesake(CHECKOUT):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    try:
        with import_module("pipeline.utils.terminal").clean_output():
            code: int = import_module(command.MODULE).main(arguments)
    except KeyboardInterrupt:
        print("interrupted; nothing was started", file=sys.stderr)
        return 130
    except OSError as error:
        # The system refused a call, as on a full disk. An error that Python code made has no number.
        if error.errno is None and error.filename is None:
            raise
        named = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {named}{error.strerror or error}", file=sys.stderr)
        return 1
    return code


def replace_unencodable() -> None:
    """Let both standard streams write `?` for a character that their encoding lacks, in place of an error.

    Other encodings than UTF-8 lack most of ours, and every encoding lacks the bytes of a file name that is not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def commands() -> list[str]:
    """The names of all commands but the installer, which are those of their scripts."""
    names = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted({*names} - {Path(__file__).stem, "__init__", INSTALLER})


def script(name: str) -> Any:
    """The module of a command's script, which is not run."""
    spec = spec_from_file_location(f"launchers.{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overview() -> str:
    """The commands, each with what its usage begins with."""
    lines = [f"  {name:10}  {re.split(r'[:.;,(]', usage(name), maxsplit=1)[0]}" for name in (*commands(), INSTALLER)]
    usage_line, hint = "usage: rollcall <command> [key=value …]", "rollcall <command> --help prints the usage of one"
    return "\n".join([usage_line, "", *lines, "", hint])


def usage(name: str) -> str:
    """The docstring of a command's script, with examples in the form in which this process was started."""
    text = inspect.cleandoc(script(name).__doc__)
    return re.sub(r"python launchers/(\w+)\.py", r"rollcall \1", text) if Path(sys.argv[0]).suffix != ".py" else text


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
