"""The front doors are true: each room names what is in it, and the house lists its rooms as they lie."""

import ast
import re
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(file.parent for name in ("pipeline", "slurm") for file in (ROOT / name).rglob("__init__.py"))
HOUSES = [ROOT / "pipeline", ROOT / "slurm"]
PLUGINS = [ROOT / "pipeline" / "tracking" / "trackers"]
"""Packages whose modules are found by listing the folder: a new one needs no line anywhere."""


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


def contents(package: Path) -> set[str]:
    """The modules and packages directly below; what runs by the package's own name has none."""
    modules = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
    return modules | {folder.parent.name for folder in package.glob("*/__init__.py")}


@pytest.mark.parametrize(
    "package",
    [package for package in PACKAGES if package not in PLUGINS],
    ids=lambda package: str(package.relative_to(ROOT)),
)
def test_a_front_door_names_what_is_behind_it(package: Path) -> None:
    named = set(re.findall(r"`(\w+)/?`", docstring(package)))
    assert not contents(package) - named, f"name them in {package.relative_to(ROOT)}/__init__.py"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_a_table_names_nothing_that_is_not_there(package: Path) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", docstring(package), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)/?`", row)} <= contents(package)


@pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.name)
def test_rooms_are_listed_from_the_roof_to_the_ground(house: Path) -> None:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = next(section["layers"] for section in contracts.values() if section.get("containers") == house.name)
    floors = [line.split(" | ") for line in layers.split("\n") if line]
    listed = re.findall(r"^\| `(\w+)` \|", docstring(house), re.M)
    place = {room: number for number, rooms in enumerate(floors) for room in rooms}
    assert [place[room] for room in listed] == sorted(place.values())
