"""Validation of a composed tree of values as a typed config, and the list of all keys.

`ConfigError` names the key, the value, the expected value and a fix. The keys are defined in `pipeline.config.schema`.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline.config.key_aliases import suggest_key
from pipeline.config.schema import RunConfig
from pipeline.config.value_types import PATTERN_MEANINGS
from pipeline.errors import ConfigError


def load_config(tree: dict[str, Any]) -> RunConfig:
    """The typed config of a composed tree of plain values. `ConfigError` for the first invalid value."""
    for key, text in _texts(tree):
        if not _is_unicode(text):
            hint = "config.json has all values as text: rename the file, or make a link to it"
            raise ConfigError(key, text, "text in UTF-8", hint)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _config_error(error.errors()[0]) from None


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts and names of keys in a tree, each with its dotted key."""
    if isinstance(value, str | PurePath):
        yield key, str(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            below = f"{key}.{name}" if key else str(name)
            yield below, str(name)
            yield from _texts(inner, below)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


def _is_unicode(text: str) -> bool:
    """Whether the text has no surrogates, with which Python stands for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


NAMED = "<name>"
"""The placeholder in a known key for a user-defined name."""


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of the config with its field, in the order of definition.

    Below a mapping of sections by name, `NAMED` stands for each name: `evaluation.sets.<name>.samples`. Below a list of
    sections it stands for each number: `task.tasks.<name>.weight`.
    """
    keys: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= known_keys(field.annotation, f"{prefix}{name}.")
            continue
        keys[prefix + name] = field
        if (named := named_section(field)) is not None:
            keys |= known_keys(named, f"{prefix}{name}.{NAMED}.")
    return keys


def named_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a mapping has under each of its names, or a list under each number; None for other fields."""
    origin, inner = get_origin(field.annotation), get_args(field.annotation)
    values = inner[1:] if origin is dict else inner[:1] if origin is tuple else ()
    kinds = (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in values)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def is_list(field: FieldInfo | None) -> bool:
    """Whether a key's value is a list."""
    return field is not None and get_origin(field.annotation) is tuple


def canonical_key(key: str, keys: Collection[str]) -> str:
    """A dotted key as `known_keys` spells it, with `NAMED` instead of a user-defined name.

    >>> canonical_key("evaluation.sets.hard.every", known_keys())
    'evaluation.sets.<name>.every'
    """
    for known in keys:
        head, mark, _ = known.partition(NAMED)
        if mark and key.startswith(head):
            _, dot, rest = key.removeprefix(head).partition(".")
            return f"{head}{NAMED}{dot}{rest}"
    return key


def closest_match(word: str, choices: list[str], default: str = "see docs/configuration.md for all of them") -> str:
    """The hint for an unknown word: `did you mean …?`, or the list of choices, or `default` if the list is long."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    if len(choices) > 20:
        return default
    return f"choose from: {', '.join(sorted(choices))}"


def expected_value(details: ErrorDetails) -> str:
    """The valid values of a field whose value is invalid, in words."""
    expected = details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if details["type"] == "string_pattern_mismatch":
        return PATTERN_MEANINGS.get(details["ctx"]["pattern"], expected)
    return expected


def _closest_choice(word: str, choices: list[str], meaning: str) -> str:
    """`closest_match`, or the choice that the meaning explains by this word, such as "`sigmoid`: DPO"."""
    explained = re.search(rf"`([^`]+)`: {re.escape(word)}\b", meaning, re.IGNORECASE)
    return f"did you mean {explained[1]}?" if explained and explained[1] in choices else closest_match(word, choices)


def _config_error(details: ErrorDetails) -> ConfigError:
    # pydantic appends "[key]" to the location of a mapping's invalid key.
    key = ".".join(str(part) for part in details["loc"] if part != "[key]")
    known = known_keys()
    canonical = canonical_key(key, known)
    if details["type"] == "extra_forbidden":
        return ConfigError(key, details["input"], "a known key", suggest_key(canonical, list(known)))
    if details["type"] == "missing":
        return ConfigError(key, None, "a value", f"set {key}=…")
    field = known.get(canonical)
    meaning = (field.description or "") if field else ""
    expected = expected_value(details)
    # The values of a Literal; the arguments of a union are types.
    choices = get_args(field.annotation) if field and not isinstance(field.annotation, UnionType) else ()
    if details["type"] == "literal_error" and choices:
        meaning = _closest_choice(str(details["input"]), [str(choice) for choice in choices], meaning) + f" ({meaning})"
    return ConfigError(key, details["input"], expected, meaning)
