"""The keys that a formula reads: the keyword-only parameters of its function."""

import inspect
from collections.abc import Callable
from typing import Any


def key_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """The names of the keyword-only parameters, in order."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def key_values(names: tuple[str, ...], section: object) -> dict[str, Any]:
    """The values of the keys in a section of the config, to call the function with."""
    return {name: getattr(section, name) for name in names}
