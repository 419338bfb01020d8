"""Types of configuration values (bounded numbers, times, names), and the base class of sections.

Every pattern has a description in words for errors. This module knows no key.
"""

import re
from collections.abc import Mapping
from ipaddress import IPv4Network
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from pipeline.run.fault_plan import parse_faults

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
BYTES_PATTERN = r"^\d+[KMGT]?$"
MEMORY_PATTERN = r"^(\d+[KMGT]?)?$"
TIME_PATTERN = r"^(\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2})?$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
KEY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
LABEL_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62})?$"
NETWORK_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}|(\d{1,3}\.){3}\d{1,3}/([12]?\d|3[0-2]))?$"
URL_PATTERN = r"^(https?://.+)?$"
PATTERN_MEANINGS = {
    BYTES_PATTERN: "bytes, or a number with K, M, G or T, such as 64M",
    MEMORY_PATTERN: "megabytes, or a number with K, M, G or T, such as 64G",
    TIME_PATTERN: "a time such as 90:00 (M:S), 12:00:00 (H:M:S), 1-12 (D-H), 1-12:30 or 1-12:30:00; quote it in YAML",
    NETWORK_PATTERN: "an interface such as ib0, or a subnet such as 10.1.0.0/16",
    KEY_NAME_PATTERN: "at most 63 letters, digits, `_`, `-`, the first a letter or digit; a dot would split the key",
    URL_PATTERN: "a URL that begins with http:// or https://",
    LABEL_PATTERN: "at most 63 letters, digits, `_`, `-`, the first a letter or digit; or nothing",
    NAME_PATTERN: "at most 63 letters, digits, `.`, `_`, `-`, the first a letter or digit",
}
"""The description of each pattern, for errors."""


def _no_bare_number(value: object) -> object:
    """Refuse numbers: YAML reads `12:00:00` as 43200, which Slurm would interpret as minutes."""
    if isinstance(value, int | float):
        raise ValueError(PATTERN_MEANINGS[TIME_PATTERN])
    return value


def in_bytes(value: object) -> object:
    """A text with a unit as a number: `64M` as 67,108,864."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(BYTES_PATTERN, value):
        raise ValueError(PATTERN_MEANINGS[BYTES_PATTERN])
    return memory_bytes(value) if value[-1].isalpha() else int(value)


def _is_subnet(value: str) -> str:
    """Normalize a subnet, and refuse one with numbers above 255."""
    try:
        return str(IPv4Network(value, strict=False)) if "/" in value else value
    except ValueError:
        raise ValueError(PATTERN_MEANINGS[NETWORK_PATTERN]) from None


def _as_list(value: object) -> object:
    """A single entry as a list, so that it may be written without brackets."""
    return (value,) if isinstance(value, str | int | float) else value


def _are_faults(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a fault that does not follow the grammar."""
    parse_faults(texts)
    return texts


Bytes = Annotated[int, BeforeValidator(in_bytes), Field(ge=1 << 16)]
BytesOrNone = Annotated[int, BeforeValidator(in_bytes), Field(ge=0)]
"""Sizes, `20M` or in bytes; of the second, 0 means that there is none."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_list)]
"""Lists. A single entry may be written without brackets."""
Faults = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_are_faults)]
Network = Annotated[str, Field(pattern=NETWORK_PATTERN), AfterValidator(_is_subnet)]
Memory = Annotated[str, Field(pattern=MEMORY_PATTERN)]
SlurmTime = Annotated[str, BeforeValidator(_no_bare_number), Field(pattern=TIME_PATTERN)]
"""A time in a format of sbatch: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; empty for none."""


def memory_bytes(value: str) -> int:
    """The bytes of a `Memory` value, 0 if empty. As in Slurm, the unit is MiB, or K, M, G, T of 1,024 each."""
    if not value:
        return 0
    number, unit = (value[:-1], value[-1]) if value[-1].isalpha() else (value, "M")
    return int(number) << 10 * (1 + "KMGT".index(unit))  # K is 2**10, M 2**20, and so on


class FrozenModel(BaseModel):
    """A frozen group of values; unknown names are errors, and so are infinity and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Section(FrozenModel):
    """A group of keys, whose values a user writes."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_converted(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `true` for a number, which would be 1, and `1e5` for a text, which would be `100000.0`."""
        _refuse_converted(value, cls.model_fields[info.field_name or ""].annotation)
        return value


def _refuse_converted(value: object, annotation: Any) -> None:
    kinds = _members(annotation)
    if isinstance(value, bool) and {int, float} & kinds and bool not in kinds:
        raise ValueError(f"a number, not {str(value).lower()}")
    if isinstance(value, float) and str in kinds and float not in kinds:
        raise ValueError("a text; put a number with a dot or an exponent into quotes")
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for kind in filter(None, map(_item_type, kinds)):
        for item in items:
            _refuse_converted(item, kind)


def _item_type(annotation: Any) -> Any:
    """The type of the items of `tuple[…, ...]` or a list, or of the values of a dict; None of any other type."""
    inner = get_args(annotation)
    if get_origin(annotation) is tuple:
        return inner[0] if inner[-1] is Ellipsis else None
    return inner[-1] if get_origin(annotation) in (list, dict) else None


def _members(annotation: Any) -> set[Any]:
    """The types of a union; of any other annotation itself, without its metadata."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {member for part in get_args(annotation) for member in _members(part)}
    return {annotation}
