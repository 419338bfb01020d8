"""The structure of the code in numbers: `python -m docs.structure [PACKAGE …]`.

For each package its rooms (the modules and packages directly below it), the arrows between them (a room imports
another), the imports that make them up, and the circles: rooms that import each other, by whatever way round.

    python -m docs.structure                     # pipeline and slurm
    python -m docs.structure pipeline.train   # the rooms of one room
    python -m docs.structure --arrows slurm      # each arrow, with its imports

Two rules hold between files, over `FOLDERS`: no circle of imports (`import_circle`), and no two modules with one name
(`repeated_names`).
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

PACKAGES = ("pipeline", "slurm")
FOLDERS = (*PACKAGES, "launchers")


@dataclass(frozen=True)
class Structure:
    """A package from above.

    Attributes:
        rooms: names of what is directly below the package.
        modules: how many modules are in each room.
        arrows: (importing room, imported room) → how many imports of modules that is.
        circles: sets of rooms that all lead to each other.
    """

    rooms: tuple[str, ...]
    modules: Mapping[str, int]
    arrows: Mapping[tuple[str, str], int]
    circles: tuple[frozenset[str], ...]


def structure_of(package: str, graph: grimp.ImportGraph) -> Structure:
    """Count the imports of modules by the rooms that they are in; imports within a room are not counted."""
    rooms = {room: graph.find_descendants(room) | {room} for room in graph.find_children(package)}
    room_of = {module: room.rpartition(".")[2] for room, modules in rooms.items() for module in modules}
    arrows: Counter[tuple[str, str]] = Counter()
    for module, room in room_of.items():
        for imported in graph.find_modules_directly_imported_by(module):
            other = room_of.get(imported)
            if other and other != room:
                arrows[room, other] += 1
    names = tuple(sorted(set(room_of.values())))
    return Structure(names, Counter(room_of.values()), arrows, _circles(names, set(arrows)))


def _circles(rooms: Sequence[str], arrows: set[tuple[str, str]]) -> tuple[frozenset[str], ...]:
    """The strongly connected components of more than one room, from the transitive closure."""
    reached = {room: {to for of, to in arrows if of == room} for room in rooms}
    for middle in rooms:
        for room in rooms:
            if middle in reached[room]:
                reached[room] |= reached[middle]
    circles = {frozenset(other for other in reached[room] if room in reached[other]) for room in rooms}
    return tuple(sorted((circle for circle in circles if circle), key=sorted))


def import_circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def file_imports(root: Path, folders: Sequence[str] = FOLDERS) -> dict[str, set[str]]:
    """Imports between the modules below `root`, by the syntax of their files.

    An import inside a function counts as any other, and so does `import_module` of a constant name. An import for type
    checking only does not count: it never runs. Nor does the implicit import of the packages that contain a module.
    """
    files = {_module_name(file, root): file for folder in folders for file in sorted((root / folder).rglob("*.py"))}
    trees = {module: ast.parse(file.read_text()) for module, file in files.items()}
    return {module: {*_imported(tree, files)} - {module} for module, tree in trees.items()}


def repeated_names(root: Path, folders: Sequence[str] = FOLDERS) -> dict[str, list[str]]:
    """File names that occur more than once, with their paths. `__init__.py` and `__main__.py` may repeat."""
    paths_by_name: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            paths_by_name[file.name].append(str(file.relative_to(root)))
    return {name: paths for name, paths in paths_by_name.items() if len(paths) > 1 and not name.startswith("__")}


def _module_name(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(node: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules among `modules` that this syntax tree imports."""
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        # `from package import name` imports the module of that name, or else the package, which defines the name.
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        named = [name if name in modules else str(node.module) for name in names]
    elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
        named = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    else:
        named = []
    yield from (name for name in named if name in modules)
    for child in _running(node):
        yield from _imported(child, modules)


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c` or of `c`; empty for other expressions."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that run: of `if TYPE_CHECKING`, only the other branch."""
    if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
        return iter(node.orelse)
    return ast.iter_child_nodes(node)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.structure", description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--arrows", action="store_true", help="list each arrow with its number of imports")
    options = parser.parse_args(arguments)
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    print("| package | rooms | modules | arrows | imports | circles |\n| --- | --- | --- | --- | --- | --- |")
    for package in options.packages:
        structure = structure_of(package, graph)
        circles = "; ".join(" ⇄ ".join(sorted(circle)) for circle in structure.circles) or "none"
        sums = (
            len(structure.rooms),
            sum(structure.modules.values()),
            len(structure.arrows),
            sum(structure.arrows.values()),
        )
        print(f"| `{package}` | {' | '.join(map(str, sums))} | {circles} |")
        if options.arrows:
            print(*(f"{of} → {to}: {count}" for (of, to), count in sorted(structure.arrows.items())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
