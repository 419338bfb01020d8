"""Writes the documentation that is derived from code: `python -m docs.generate` (or `--check`).

Owns `docs/configuration.md`, generated from the field descriptions in `pipeline/config/`, the table of the readers of
each key, and the options of the built-in tasks, so that the reference cannot disagree with the validation. Owns also
the layers in `docs/concepts.md`, generated from the import contracts in `.importlinter`, which CI checks.
"""

import sys
from collections.abc import Mapping
from configparser import ConfigParser
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import NAMED, RunConfig, known_keys, named_section
from pipeline.config.key_relevance import READ_WITH
from pipeline.config.value_types import in_bytes
from pipeline.environments import BUILT_IN
from slurm.submission.compose_config import config_groups

TARGET = Path(__file__).parent / "configuration.md"
LAYOUT = Path(__file__).parent / "concepts.md"
CONTRACTS = Path(__file__).parents[1] / ".importlinter"
LAYERS_BEGIN, LAYERS_END = "<!-- layers, by make docs -->\n", "<!-- end of layers -->\n"
HEAD = """# Configuration

This page lists every key of a run. `make docs` generates it from the field descriptions in `pipeline/config/`, which
also validates every value before anything starts; edit the descriptions there. A key with the note "Only with" is
refused without the named setting, unless it has its default. Set a key with `key=value` on the command line, or choose
a whole group:

"""


def reference() -> str:
    """The page."""
    lines = [HEAD + "| group | choices |", "|---|---|"]
    lines += [
        f"| `{group}=` | {', '.join(f'`{choice}`' for choice in choices)} |"
        for group, choices in config_groups().items()
    ]
    for section, fields in _by_section().items():
        purpose = cleandoc(_section(section).__doc__ or "")
        title = section.replace("<", "\\<") or "The run"
        lines += ["", f"## {title}", "", purpose, "", *_table(fields)]
    for name, path in BUILT_IN.items():
        module, _, attribute = path.partition(":")
        options: type[BaseModel] = getattr(import_module(module), attribute).Options
        named = [(f"task.options.{option}", field) for option, field in options.model_fields.items()]
        if named:
            lines += ["", f"## Options of the task `{name}`", "", *_table(named)]
    return "\n".join(lines) + "\n"


def with_layers(page: str) -> str:
    """The page with the layers of the import contracts between its two marks."""
    head, _, rest = page.partition(LAYERS_BEGIN)
    return head + LAYERS_BEGIN + _layers() + LAYERS_END + rest.partition(LAYERS_END)[2]


def _layers() -> str:
    """One line for each contract between layers: a package, and what is in it from the top down."""
    contracts = ConfigParser()
    contracts.read(CONTRACTS)
    lines = []
    for contract in contracts.values():
        if contract.get("type") == "layers":
            floors = [floor.replace(" | ", ", ") for floor in contract["layers"].split("\n") if floor]
            lines.append(f"- `{contract['containers'].strip()}`: {' → '.join(floors)}\n")
    return "".join(lines)


def _by_section() -> dict[str, list[tuple[str, FieldInfo]]]:
    sections: dict[str, list[tuple[str, FieldInfo]]] = {}
    for key, field in known_keys().items():
        sections.setdefault(key.rpartition(".")[0], []).append((key, field))
    return sections


def _section(path: str) -> type[BaseModel]:
    section: type[BaseModel] = RunConfig
    for name in filter(None, path.replace(f".{NAMED}", "").split(".")):
        field = section.model_fields[name]
        section = named_section(field) or field.annotation  # type: ignore[assignment]
    return section


def _table(fields: list[tuple[str, FieldInfo]]) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields:
        default = "required" if field.is_required() else _code(_plain(field.get_default(call_default_factory=True)))
        kind, reader = _type(field.annotation, field.metadata), READ_WITH.get(key)
        meaning = f"{field.description} Only with `{reader}`." if reader else field.description
        rows.append(f"| `{key}` | {kind} | {default} | {meaning} |")
    return rows


def _code(value: object) -> str:
    return f"`{value}`"


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "{}" if isinstance(value, Mapping) else str(value)


def _type(kind: Any, metadata: list[Any]) -> str:
    bounds = ", ".join(filter(None, map(_bound, metadata)))
    return f"{_name(kind)}{f', {bounds}' if bounds else ''}"


def _name(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(_code, inner))
    if origin is Annotated:
        return _type(inner[0], list(inner[1:]))
    if origin is tuple:
        return f"list of {_name(inner[0])}"
    if origin in (Union, UnionType):
        return " or ".join(_name(part) for part in inner if part is not NoneType)
    return {"int": "integer", "float": "number", "str": "text", "bool": "true, false", "Path": "path"}.get(
        getattr(kind, "__name__", ""), "mapping"
    )


def _bound(limit: Any) -> str:
    if getattr(limit, "func", None) is in_bytes:
        return "or such as `64M`"
    nested = getattr(limit, "metadata", None)
    if nested:
        return ", ".join(filter(None, map(_bound, nested)))
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ", ".join(
        f"{sign} {getattr(limit, name)}" for name, sign in signs.items() if getattr(limit, name, None) is not None
    )


def main() -> int:
    pages = {TARGET: reference(), LAYOUT: with_layers(LAYOUT.read_text())}
    old = [file for file, page in pages.items() if file.read_text() != page]
    if "--check" in sys.argv:
        for file in old:
            print(f"{file.name} is older than the code: run make docs", file=sys.stderr)
        return 1 if old else 0
    for file in old:
        file.write_text(pages[file])
    return 0


if __name__ == "__main__":
    sys.exit(main())
