"""The frozen config of a run, read from `config.json` in its directory.

Readers get the submitted config or None. A reader that requires one raises its own error. Only this file is read.
A launcher of a newer version writes the file with `in_older_form`, since the run's own code refuses keys that it lacks.
"""

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from pipeline.config import RunConfig, load_config
from pipeline.config.validation import NAMED, known_keys
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files


def read_frozen_config(run: RunPaths) -> RunConfig | None:
    """The submitted config of a run; None if the file is missing, damaged, or invalid for this version."""
    tree = shared_files.read_document(run.config, dict[str, Any])
    try:
        return None if tree is None else load_config(tree)
    except ConfigError:
        return None


def in_older_form(config: RunConfig, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a config for the version of the code that wrote the tree `earlier`: without keys that it lacks.

    A key that is left out has its default, which means the same as its absence. `ConfigError` for another value.
    """
    tree = config.model_dump(mode="json")
    for key, field in known_keys().items():
        if NAMED not in key and not _has(earlier, key.split(".")):
            _leave_out(tree, key, field, earlier)
    return tree


def _has(tree: Any, names: list[str]) -> bool:
    for name in names:
        if not isinstance(tree, Mapping):
            return True  # a section that is absent as a whole, or of another kind: the older version knows it
        if name not in tree:
            return False
        tree = tree[name]
    return True


def _leave_out(tree: dict[str, Any], key: str, field: FieldInfo, earlier: Mapping[str, Any]) -> None:
    *names, last = key.split(".")
    sections: list[Any] = [tree]
    for name in names:
        sections.append(sections[-1].get(name, {}) if isinstance(sections[-1], dict) else {})
    if not isinstance(sections[-1], dict) or last not in sections[-1]:
        return
    value, default = sections[-1][last], to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)
    if value != default:
        raise ConfigError(
            key, value, f"{default!r} in a run of an older version, whose code lacks the key", "leave it out"
        )
    del sections[-1][last]
    while names and not sections[-1] and not _has(earlier, names):
        sections.pop()
        del sections[-1][names.pop()]
