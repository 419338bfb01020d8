"""Sizes in bytes, with a unit or without."""

import pytest

from pipeline.errors import ConfigError
from tests.fakes.composed_config import compose_cached


@pytest.mark.parametrize(
    ("text", "size"), [("65536", 65536), ("64K", 65536), ("20M", 20 << 20), ("2G", 2 << 30), ("1T", 1 << 40)]
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    config = compose_cached(["name=test", f"rollout.sample_store_bytes={text}", f"inference.kv_cache_bytes={text}"])
    assert config.rollout.sample_store_bytes == config.inference.kv_cache_bytes == size


@pytest.mark.parametrize("text", ["20X", "1.5G", "0x20", "20MB", "M"])
def test_another_unit_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(ConfigError, match="bytes, or a number with K, M, G or T, such as 64M"):
        compose_cached(["name=test", f"rollout.sample_store_bytes={text}"])


def test_no_size_is_none_only_where_it_may_be() -> None:
    assert compose_cached(["name=test", "rollout.journal_bytes=0"]).rollout.journal_bytes == 0
    with pytest.raises(ConfigError, match="greater than or equal to 65536"):
        compose_cached(["name=test", "inference.kv_cache_bytes=0"])
