"""A run's frozen config, read back.

Owns the one rule by which `config.json` becomes a config again. Promises that whoever reads it gets what was submitted,
or None; who must have one says so in its own words. Must not look at models or at anything outside of the file.
"""

from typing import Any

from pipeline.config import RunConfig, load_config
from pipeline.errors import ConfigError
from pipeline.run.paths import RunPaths
from pipeline.utils import shared_files


def read_frozen_config(run: RunPaths) -> RunConfig | None:
    """The config that the run was made with, or None when there is none that this version reads."""
    tree = shared_files.read_document(run.config, dict[str, Any])
    try:
        return None if tree is None else load_config(tree)
    except ConfigError:
        return None
