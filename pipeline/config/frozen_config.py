"""The frozen config of a run, read from `config.json` in its directory.

Readers get the submitted config or None. A reader that requires one raises its own error. Only this file is read.
"""

from typing import Any

from pipeline.config import RunConfig, load_config
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
