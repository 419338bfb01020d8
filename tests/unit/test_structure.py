"""The structure of the code: what counts as a room, an arrow and a circle; no circle and no name twice among files."""

import sys
from itertools import pairwise
from pathlib import Path

import grimp
import pytest

from docs.structure import Structure, file_imports, import_circle, repeated_names, structure_of

ROOT = Path(__file__).parents[2]

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


def files(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = folder / "house" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    "back",
    [
        "import house.roof",
        "from house import roof",
        "def climb():\n    from house.roof import tile",
        "class Step:\n    def climb(self):\n        import_module('house.roof')",
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import house.roof",
    ],
)
def test_a_circle_of_files_is_named_wherever_the_import_stands(tmp_path: Path, back: str) -> None:
    root = files(tmp_path, roof="from house.hall.door import key", hall__door="import house.cellar", cellar=back)
    circle = import_circle(file_imports(root, ["house"]))
    assert set(circle) == {"house.roof", "house.hall.door", "house.cellar"}
    assert (circle[0], len(circle)) == (circle[-1], 4)
    following = dict(pairwise(circle))
    assert following["house.roof"] == "house.hall.door"


@pytest.mark.parametrize("back", ["if TYPE_CHECKING:\n    import house.roof", "import os", "name = 'house.roof'"])
def test_an_import_for_types_is_no_arrow(tmp_path: Path, back: str) -> None:
    root = files(tmp_path, roof="import house.cellar", cellar=back)
    assert file_imports(root, ["house"]) == {"house.cellar": set(), "house.roof": {"house.cellar"}}
    assert import_circle(file_imports(root, ["house"])) == []


def test_a_name_of_two_modules_is_reported(tmp_path: Path) -> None:
    root = files(tmp_path, door="", __init__="", hall__door="", hall____init__="", cellar="")
    assert repeated_names(root, ["house"]) == {"door.py": ["house/door.py", "house/hall/door.py"]}


def test_no_file_of_ours_is_in_a_circle() -> None:
    imports = file_imports(ROOT)
    assert sum(map(len, imports.values())) > 1000
    assert " → ".join(import_circle(imports)) == ""


def test_no_two_modules_of_ours_have_one_name() -> None:
    assert repeated_names(ROOT) == {}
