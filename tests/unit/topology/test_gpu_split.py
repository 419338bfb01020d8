"""How many GPUs should train, and how many should serve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.topology.gpu_split import WORTHWHILE, Split, best_split

FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("halves", "per_server", "idle", "best"),
    [
        ((2, 6), 1, (0.0, 2 / 3), Split(4, 4, 2.0)),
        ((6, 2), 1, (0.5, 0.0), Split(5, 3, 1.5)),  # 3 and 2 GPU-steps of work: 3/5 and 2/3 of a step
        ((6, 2), 2, (0.8, 0.0), Split(4, 4, 2.0)),
        ((1, 1), 1, (0.9, 0.0), None),
        ((4, 4), 1, (0.0, 0.0), None),
        ((4, 4), 4, (0.0, 0.9), None),
    ],
)
def test_the_same_work_is_dealt_to_the_same_gpus(
    halves: tuple[int, int], per_server: int, idle: tuple[float, float], best: Split | None
) -> None:
    found = best_split(*halves, per_server, *idle)
    assert (found and (found.trainer, found.servers)) == (best and (best.trainer, best.servers))
    assert found is None or best is None or found.factor == pytest.approx(best.factor)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), FRACTIONS, FRACTIONS)
def test_a_split_uses_all_gpus_and_is_worth_the_change(
    trainer: int, servers: int, per_server: int, idle_trainer: float, idle_servers: float
) -> None:
    serving = servers * per_server
    found = best_split(trainer, serving, per_server, idle_trainer, idle_servers)
    if found is not None:
        assert found.trainer + found.servers == trainer + serving
        assert found.trainer > 0
        assert found.servers % per_server == 0
        assert found.factor >= WORTHWHILE
