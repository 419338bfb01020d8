"""Functions of vLLM that modules of this folder replace: found in the installed release, or refused.

Promises that a release which has such a function no more, or with other parameters, is refused by one line when a
server starts. A replacement that nobody calls, or with other arguments, would fail late, or change results in silence.

    stock = stock_function(Worker, "determine_available_memory", "self", by=__name__)
    if stock is not None:
        Worker.determine_available_memory = …       # a function of the module, which calls `stock`
"""

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def stock_function(owner: Any, name: str, *parameters: str, by: str, key: str = "") -> Callable[..., Any] | None:
    """vLLM's `owner.name`, a method or a function of a module; None if the module `by` has replaced it already.

    `ImportError` if this release has none with exactly these parameters; `key` is the setting that needs it, if not
    every run does.
    """
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if getattr(function, "__module__", "") == by:
        return None
    if function is None or not accepts_parameters(function, *parameters):
        actual = "none" if function is None else f"{name}{inspect.signature(function)}"
        hint = f"leave out {key}, or install a release that has it" if key else "install a release that has it"
        expected = f"{owner.__name__}.{name}({', '.join(parameters)})"
        raise ImportError(f"vLLM {version('vllm')} is not known to {by}: expected {expected}, found {actual}; {hint}")
    return function


def accepts_parameters(function: Callable[..., Any], *arguments: str) -> bool:
    """Whether a function of vLLM has exactly these parameters, in this order."""
    return tuple(inspect.signature(function).parameters) == arguments
