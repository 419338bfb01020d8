"""Each kind of file in a run directory, missing, cut off, or with a changed bit: named and survived, or refused.

docs/checkpoints.md has the outcomes as a table, which this module compares with what it observes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from pipeline.run.paths import RunPaths
from tests.support.runs.run_files import RUN_FILES, RunFile, make_run, outcome

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BITS = 24
"""Bits of a file that are changed, one at a time: in its first byte, its last one, and by chance between them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return make_run(tmp_path_factory.mktemp("damage") / "run")


def cut_off(data: bytes) -> Iterator[bytes]:
    yield from (data[:length] for length in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 1}))


def changed_bits(data: bytes) -> Iterator[bytes]:
    draw = Random(len(data))
    places = {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(BITS))}
    for place in sorted(places):
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        yield bytes(changed)


def outcomes(file: RunFile, run: RunPaths, versions: Callable[[bytes], Iterator[bytes]] | None) -> str:
    """The outcomes of a kind of damage, in words; without `versions` the file is removed."""
    path = run.root / file.path
    data, original = path.read_bytes(), file.read(run)
    try:
        if versions is None:
            path.unlink()
            return outcome(file, run, original)
        words = set()
        for damaged in versions(data):
            path.write_bytes(damaged)
            words.add(outcome(file, run, original))
        return ", ".join(sorted(words))
    finally:
        path.write_bytes(data)


def table_row(file: RunFile, run: RunPaths) -> str:
    cells = [outcomes(file, run, versions) for versions in (None, cut_off, changed_bits)]
    return f"| `{file.path}` | {' | '.join(cells)} | {file.consequence} |"


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.path)
def test_a_damaged_file_has_the_outcome_that_the_page_names(file: RunFile, run: RunPaths) -> None:
    row = table_row(file, run)
    assert row in PAGE.read_text().splitlines(), f"expected in {PAGE.name}:\n{row}"


def test_the_page_names_no_other_files() -> None:
    section = PAGE.read_text().partition("## Damaged files")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(RUN_FILES)
