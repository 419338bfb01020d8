"""Words of a private dialect stay out of the program: its prose and its names use the field's.

The list has the words that cost readers most, each with the field's word.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for room in ("pipeline", "slurm", "launchers", "conf") for path in (ROOT / room).rglob("*.py"))
PROSE = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"in vain": "wasted",
    r"for want of": "for lack of",
    r"bears? (a|an|the)": "tolerates",
    r"whoever": "the noun",
    r"that which": "the noun",
    r"believes?": "accepts, validates",
    r"owes?": "must",
    r"hears?": "receives",
    r"gone on from": "resumed from",
    r"so (many|much) (of|as|rows|tokens|bytes|that)": "n, this many",
    r"(is|are|was|were) told": "is notified, receives",
    r"(is|are|was|were|has|have) given up": "is abandoned",
    r"goes on": "continues",
    r"what (it|they) (is|are|has|have|was|were)": "the noun",
    r"of which": "split the sentence",
    r"the front": "the gateway",
    r"warm start": "SFT",
}
NAMES = (
    "mend",
    "anew",
    "told",
    "said",
    "news",
    "dealt",
    "spared",
    "kin",
    "guest",
    "guests",
    "crowded",
    "intact",
    "lay",
    "asked",
    "door",
    "found",
    "front",
    "given",
    "heard",
    "kept",
    "place",
    "places",
    "seat",
    "settle",
    "settled",
    "shelf",
    "strangers",
    "wanted",
)
"""Parts of identifiers."""
ALLOWED = {"NotFoundError"}
"""The name of HTTP status 404."""


def prose_of(text: str) -> str:
    """Comments, docstrings and messages."""
    parts = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            parts.append(token.string)
    return "\n".join(parts)


def names_of(text: str) -> set[str]:
    """The words of all identifiers that a file defines."""
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {word for name in names - ALLOWED for word in re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower())}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_the_fields_words(path: Path) -> None:
    text = path.read_text()
    prose = prose_of(text)
    listed = [f"{match[0]!r}: {word}" for old, word in PROSE.items() for match in re.finditer(rf"\b{old}\b", prose)]
    assert not listed, listed
    opaque = names_of(text) & set(NAMES)
    assert not opaque, f"name the value by what it is, not {opaque}"


def test_the_list_finds_what_it_lists() -> None:
    text = '"""Mends nothing anew: whoever hears it is told."""\ndef dealt(news: int) -> None: ...\n'
    assert sum(len(re.findall(rf"\b{old}\b", prose_of(text))) for old in PROSE) == 4
    assert names_of(text) & set(NAMES) == {"dealt", "news"}
