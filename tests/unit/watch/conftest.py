"""What the tests of watching share."""

import pytest

from tests.fakes.scheduler import FakeScheduler


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()
