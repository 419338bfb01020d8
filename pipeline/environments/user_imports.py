"""Import of the user's code by name.

Owns the resolution of `package.module:name` to an object. Promises that any failure, also inside the user's module, is
a `ConfigError` that names the key and the line. Must not know the purpose of the object.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pipeline.environments.frozen_code import use_frozen
from pipeline.errors import ConfigError, one_line


def import_object(key: str, name: str, expected: str, unnamed: str) -> Any:
    """The object that `package.module:name` names. `expected` describes a valid value of `key`; `unnamed` is the hint
    for a name without a module."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(key, name, expected, unnamed)
    use_frozen()
    with user_import_errors(key, name, "a module that can be imported"):
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(key, name, expected, f"{error}; is its folder in PYTHONPATH?") from None
    loaded_object = getattr(loaded, attribute, None)
    if loaded_object is None:
        raise ConfigError(key, name, expected, f"{module} ({loaded.__file__}) has no {attribute}")
    return loaded_object


@contextmanager
def user_import_errors(key: str, name: str, expected: str) -> Iterator[None]:
    """Translates any error of the code behind `key=name` into a `ConfigError` with the file and line of the error."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        what = one_line(error)
        hint = f"{what} ({Path(frame.filename).name}, line {frame.lineno})"
        raise ConfigError(key, name, expected, hint) from error
