"""The inference engines of this checkout, by name.

A folder of this package with a module `<name>_engine` is an engine; `pipeline.config.rollout_keys` accepts the same
names for `inference.engine`.
"""

from functools import cache
from importlib import import_module

from pipeline.config.rollout_keys import engine_names
from pipeline.inference.engine_protocol import InferenceEngine


@cache
def find_engine(name: str) -> InferenceEngine:
    """The engine with this name, a value of `inference.engine`."""
    engine: InferenceEngine = import_module(f"pipeline.inference.{name}.{name}_engine").ENGINE
    return engine


def all_engines() -> list[InferenceEngine]:
    """All engines, in the order of their names."""
    return [find_engine(name) for name in engine_names()]
