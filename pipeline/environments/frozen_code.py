"""The modules of a user's tasks and reward functions, as they were when a run was made.

Owns which files those are, their copy in the run's snapshot of the code, and that its processes import the copy.
Promises that an edit after the first submission reaches no attempt of the run, in no worker that starts later either;
and that a module's `__file__` stays what it was, so that data beside it are found. Installed packages, data, and
modules whose names are made at run time are not copied.

    keep(modules_named_in(config), run.code)     # at the first submission
    use_frozen()                           # in every process, before it imports code of the user's
"""

import ast
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

import pipeline
from pipeline.config import RunConfig

OURS = ("pipeline", "slurm", "conf")
"""Packages of which the snapshot has all."""
_FOLDER, _INDEX = ".user", "index.json"
"""No module can have such a name, so the folder hides none."""
_INSTALLED = ("site-packages", "dist-packages")


class _FrozenFile(msgspec.Struct):
    """One module: its file when it was copied, and the copy."""

    file: str
    copy: str


def modules_named_in(config: RunConfig) -> list[str]:
    """The modules that a config names: of tasks, of those that agents work on, and of reward functions."""
    sets = config.evaluation.sets.values()
    tasks = [config.task, *(each.task for each in sets if each.task)]
    rewards = [config.reward, *(each.reward for each in sets)]
    below = [of.get("name") for task in tasks if isinstance(of := task.options.get("of"), Mapping)]
    named = [*(task.name for task in tasks), *below, *(name for each in rewards for name in each.functions)]
    return [name.partition(":")[0] for name in named if isinstance(name, str) and ":" in name]


def copy_modules(names: Iterable[str], code: Path) -> None:
    """Copy these modules, and what they import from the same folders, into a snapshot that is being made."""
    index = dict[str, _FrozenFile]()
    for name, file in modules_of(names).items():
        copy = code / _FOLDER / Path(*name.split(".")) / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        index[name] = _FrozenFile(str(file), str(copy.relative_to(code / _FOLDER)))
    if index:
        (code / _FOLDER / _INDEX).write_bytes(msgspec.json.encode(index))


def changed_modules(code: Path) -> list[Path]:
    """The files that are not any more what a snapshot has of them."""
    kept = _read(code).values()
    return [Path(each.file) for each in kept if not _same(Path(each.file), code / _FOLDER / each.copy)]


@cache
def use_frozen() -> None:
    """Have imports of this process find the copies, where it runs from a snapshot that has some."""
    code = Path(pipeline.__file__).parent.parent
    if index := _read(code):
        sys.meta_path.insert(0, _Finder(code / _FOLDER, index))


def modules_of(names: Iterable[str]) -> dict[str, Path]:
    """The files of these modules and of all that they import, in functions too, from the folders that they lie in."""
    found, waiting = dict[str, Path](), [*names]
    while waiting:
        name = waiting.pop()
        if name in found or (file := _file_of(name)) is None:
            continue
        found[name] = file
        waiting += [name.rpartition(".")[0], *_imported(name, file)]
    return found


def _file_of(name: str) -> Path | None:
    top, *below = name.split(".")
    root = _root(top) if top else None
    if root is None:
        return None
    place = root.joinpath(top, *below)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _root(top: str) -> Path | None:
    """The folder on the path that a module lies in; None for what is installed, built in, ours, or not there."""
    if top in OURS or top in sys.stdlib_module_names:
        return None
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else [""]
    if not places[0]:
        return None
    place = Path(places[0]).resolve()
    installed = place.is_relative_to(sysconfig.get_path("stdlib")) or not {*_INSTALLED}.isdisjoint(place.parts)
    return None if installed else place.parent


def _imported(name: str, file: Path) -> Iterator[str]:
    """The names that a module's statements import, also those that may be attributes of modules."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    try:
        statements = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            above = package[: len(package) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *filter(None, [statement.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in statement.names)


def _read(code: Path) -> dict[str, _FrozenFile]:
    index = code / _FOLDER / _INDEX
    return msgspec.json.decode(index.read_bytes(), type=dict[str, _FrozenFile]) if index.is_file() else {}


def _same(file: Path, copy: Path) -> bool:
    try:
        return file.read_bytes() == copy.read_bytes()
    except OSError:
        return False


class _Loader(SourceFileLoader):
    """Runs the copy under the name of the file; its bytecode is not kept, since it would pass for that of the file."""

    def __init__(self, name: str, file: str, copy: Path) -> None:
        super().__init__(name, file)
        self._copy = copy

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._copy.read_bytes(), self.path)
        return code


class _Finder(MetaPathFinder):
    """Finds the modules that were copied; others are found as ever."""

    def __init__(self, folder: Path, index: Mapping[str, _FrozenFile]) -> None:
        self._folder, self._index = folder, index

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        kept = self._index.get(fullname)
        if kept is None:
            return None
        loader, file = _Loader(fullname, kept.file, self._folder / kept.copy), Path(kept.file)
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)
