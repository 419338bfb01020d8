"""The modules of a user's tasks and reward functions, frozen when the run was made.

Owns the list of those files, their copy in the run's snapshot of the code, and the import hook that loads the copy.
Promises that an edit after the first submission reaches no attempt of the run and no worker, however late it starts;
and that a module's `__file__` is unchanged, so that data files next to it are readable. Installed packages, data, and
modules whose names are made at run time are not copied.

    copy_modules(modules_named_in(config), run.code)     # at the first submission
    use_frozen()                                         # in every process, before it imports user code
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
"""Packages that the snapshot contains completely."""
_FOLDER, _INDEX = ".user", "index.json"
"""No module can have such a name, so the folder shadows none."""
_INSTALLED = ("site-packages", "dist-packages")


class _FrozenFile(msgspec.Struct):
    """One module: its file at the time of the copy, and the copy."""

    file: str
    copy: str


def modules_named_in(config: RunConfig) -> list[str]:
    """The modules that a config names: of tasks, of the tasks below agents, and of reward functions."""
    sets = config.evaluation.sets.values()
    configured = [config.task, *(eval_set.task for eval_set in sets if eval_set.task)]
    tasks = [task for one in configured for task in one.alone()]
    rewards = [config.reward, *(eval_set.reward for eval_set in sets)]
    below = [of.get("name") for task in tasks if isinstance(of := task.options.get("of"), Mapping)]
    named = [*(task.name for task in tasks), *below, *(name for reward in rewards for name in reward.functions)]
    return [name.partition(":")[0] for name in named if isinstance(name, str) and ":" in name]


def copy_modules(names: Iterable[str], code: Path) -> None:
    """Copy these modules, and their imports from the same folders, into a snapshot that is being made."""
    index = dict[str, _FrozenFile]()
    for name, file in modules_of(names).items():
        copy = code / _FOLDER / Path(*name.split(".")) / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        index[name] = _FrozenFile(str(file), str(copy.relative_to(code / _FOLDER)))
    if index:
        (code / _FOLDER / _INDEX).write_bytes(msgspec.json.encode(index))


def changed_modules(code: Path) -> list[Path]:
    """The files that differ from their copy in a snapshot."""
    frozen = _read(code).values()
    return [Path(module.file) for module in frozen if not _same(Path(module.file), code / _FOLDER / module.copy)]


@cache
def use_frozen() -> None:
    """Make imports of this process load the copies, if it runs from a snapshot that has some."""
    code = Path(pipeline.__file__).parent.parent
    if index := _read(code):
        sys.meta_path.insert(0, _Finder(code / _FOLDER, index))


def modules_of(names: Iterable[str]) -> dict[str, Path]:
    """The files of these modules and of all their imports (also those inside functions) from the same folders."""
    files, waiting = dict[str, Path](), [*names]
    while waiting:
        name = waiting.pop()
        if name in files or (file := _file_of(name)) is None:
            continue
        files[name] = file
        # Importing a.b.c also imports its parents a.b and a.
        waiting += [name.rpartition(".")[0], *_imported(name, file)]
    return files


def _file_of(name: str) -> Path | None:
    top, *below = name.split(".")
    root = _root(top) if top else None
    if root is None:
        return None
    base = root.joinpath(top, *below)
    files = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _root(top: str) -> Path | None:
    """The folder of a top-level module; None if it is installed, built in, part of Rollcall, or missing."""
    if top in OURS or top in sys.stdlib_module_names:
        return None
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    locations = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else [""]
    if not locations[0]:
        return None
    path = Path(locations[0]).resolve()
    installed = path.is_relative_to(sysconfig.get_path("stdlib")) or not {*_INSTALLED}.isdisjoint(path.parts)
    return None if installed else path.parent


def _imported(name: str, file: Path) -> Iterator[str]:
    """The names that a module's statements import, including names that may be attributes of modules."""
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
    """Runs the copy under the name of the file. Bytecode is not cached, since it would pass for that of the file."""

    def __init__(self, name: str, file: str, copy: Path) -> None:
        super().__init__(name, file)
        self._copy = copy

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._copy.read_bytes(), self.path)
        return code


class _Finder(MetaPathFinder):
    """Finds the modules that were copied, and no others."""

    def __init__(self, folder: Path, index: Mapping[str, _FrozenFile]) -> None:
        self._folder, self._index = folder, index

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        frozen = self._index.get(fullname)
        if frozen is None:
            return None
        loader, file = _Loader(fullname, frozen.file, self._folder / frozen.copy), Path(frozen.file)
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)
