"""The structure of the code in numbers: what counts as a room, an arrow and a circle."""

import sys
from pathlib import Path

import grimp
import pytest

from docs.structure import Structure, structure_of

FILES = {
    "house/__init__.py": "",
    "house/roof.py": "from house.hall import door\nfrom house.hall.door import key\nimport house.cellar\n",
    "house/hall/__init__.py": "",
    "house/hall/door.py": "from house.hall import key\nkey = 1\n",
    "house/hall/key.py": "",
    "house/cellar.py": "import house.hall.key\n",
}


def structure(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **changed: str) -> Structure:
    for path, text in (FILES | {f"house/{key}.py": value for key, value in changed.items()}).items():
        file = folder / path.replace("house", name, 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("house", name))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return structure_of(name, grimp.build_graph(name, cache_dir=None))


def test_rooms_are_what_is_directly_below_and_arrows_count_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = structure(tmp_path, monkeypatch, "house_of_three")
    assert dict(found.modules) == {"cellar": 1, "hall": 3, "roof": 1}
    assert dict(found.arrows) == {("roof", "hall"): 1, ("roof", "cellar"): 1, ("cellar", "hall"): 1}
    assert found.circles == ()


def test_rooms_that_lead_to_each_other_by_a_third_are_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = structure(tmp_path, monkeypatch, "house_with_stairs", **{"hall/key": "import house.roof\n"})
    assert found.circles == (frozenset({"cellar", "hall", "roof"}),)


def test_no_room_of_ours_is_in_a_circle() -> None:
    graph = grimp.build_graph("pipeline", "slurm", cache_dir=None)
    for package in ("pipeline", "slurm"):
        assert structure_of(package, graph).circles == ()
