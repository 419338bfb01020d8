"""What the integration tests share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.servers import Served


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[list[Served]]":
    """Two real vLLM servers of a tiny model, ended with these tests; see `tests.integration.servers`."""
    from tests.integration.servers import two_servers

    with two_servers(tmp_path_factory.mktemp("servers")) as ready:
        yield ready
