"""The structure of the code in numbers: `python -m docs.structure [PACKAGE …]`.

For each package its rooms (the modules and packages directly below it), the arrows between them (a room imports
another), the imports that make them up, and the circles: rooms that import each other, by whatever way round.

    python -m docs.structure                     # pipeline and slurm
    python -m docs.structure pipeline.train   # the rooms of one room
    python -m docs.structure --arrows slurm      # each arrow, with its imports
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grimp

PACKAGES = ("pipeline", "slurm")


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
    found = {frozenset(other for other in reached[room] if room in reached[other]) for room in rooms}
    return tuple(sorted((circle for circle in found if circle), key=sorted))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.structure", description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--arrows", action="store_true", help="list each arrow with its number of imports")
    options = parser.parse_args(arguments)
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    print("| package | rooms | modules | arrows | imports | circles |\n| --- | --- | --- | --- | --- | --- |")
    for package in options.packages:
        found = structure_of(package, graph)
        circles = "; ".join(" ⇄ ".join(sorted(circle)) for circle in found.circles) or "none"
        sums = (len(found.rooms), sum(found.modules.values()), len(found.arrows), sum(found.arrows.values()))
        print(f"| `{package}` | {' | '.join(map(str, sums))} | {circles} |")
        if options.arrows:
            print(*(f"{of} → {to}: {count}" for (of, to), count in sorted(found.arrows.items())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
