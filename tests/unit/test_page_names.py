"""The modules, names and files that the pages mention exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "pipeline|slurm|conf|launchers|tests|docs"


def is_name(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name inside of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    imports = re.findall(r"from ((?:pipeline|slurm|conf)[\w.]*) import (\w+(?:, \w+)*)", text)
    names = [f"{module}.{name}" for module, listed in imports for name in listed.split(", ")]
    names += re.findall(r"`((?:pipeline|slurm)(?:\.\w+)+)`", text)
    assert [name for name in names if not is_name(name)] == []
    files = re.findall(rf"`((?:{ROOMS})/[\w./-]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    assert is_name("pipeline.errors.RollcallError")
    assert is_name("pipeline.train.batching")
    assert not is_name("pipeline.errors.NoSuchError")
    assert not is_name("pipeline.no_such_module")
