"""Whether a run is finished.

Owns the one rule: `finished.json` exists and is readable. A damaged file finishes nothing: the run resumes from its
newest checkpoint, which is of its last step, and writes the file again.
"""

from pipeline.run.paths import RunPaths
from pipeline.run.run_documents import Finished
from pipeline.utils import shared_files


def is_finished(run: RunPaths) -> bool:
    """Whether the run has reached its last step and every role has stopped."""
    return shared_files.read_document(run.finished, Finished) is not None


def finish(run: RunPaths, finished: Finished) -> None:
    """Record that the run is finished, unless that is recorded; a damaged file is replaced."""
    if not shared_files.create_document(run.finished, finished) and not is_finished(run):
        shared_files.write_document(run.finished, finished)
