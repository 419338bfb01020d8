"""What the tests of the batch share."""

from pathlib import Path

import pytest

from tests.fakes.requeued_job import LATE_SECONDS, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, max_restarts=5, max_failures=2, fs_visibility_seconds=LATE_SECONDS)
