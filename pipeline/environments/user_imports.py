"""Code of the user's, found by name.

Owns how `package.module:name` becomes an object. Promises that whatever goes wrong, in the user's module too, is a
`ConfigError` that names the key and the line. Must not know what the object is for.
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
    """What `package.module:name` names. `expected` says what the value of `key` should be; `unnamed` how to mend one
    that has no module."""
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
    found = getattr(loaded, attribute, None)
    if found is None:
        raise ConfigError(key, name, expected, f"{module} ({loaded.__file__}) has no {attribute}")
    return found


@contextmanager
def user_import_errors(key: str, name: str, expected: str) -> Iterator[None]:
    """Translates whatever the code behind `key=name` raises into a `ConfigError` that says where it happened."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        what = one_line(error)
        hint = f"{what} ({Path(place.filename).name}, line {place.lineno})"
        raise ConfigError(key, name, expected, hint) from error
