"""Whether a run is at its end.

Owns the one rule: `finished.json` is there and whole. A damaged one ends nothing: the run goes on from its newest
checkpoint, which is of its last step, and writes the file again.
"""

from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files


def is_finished(run: RunPaths) -> bool:
    """Whether the run reached its last step and every role came down."""
    return shared_files.read_document(run.finished, Finished) is not None


def finish(run: RunPaths, finished: Finished) -> None:
    """Write down that the run is at its end, unless that is known; a damaged file is replaced."""
    if not shared_files.create_document(run.finished, finished) and not is_finished(run):
        shared_files.write_document(run.finished, finished)
