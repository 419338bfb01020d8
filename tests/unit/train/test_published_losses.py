"""`loss=NAME` is what its paper publishes, and the rules behind DAPO's keys."""

import pytest

from pipeline.algorithms.overlong_penalty import overlong_penalty
from pipeline.config import RunConfig
from slurm.submission.compose_config import compose_config


def chosen(name: str, *more: str) -> RunConfig:
    return compose_config(["name=test", f"loss={name}", *more])


def test_dapo_has_all_four_parts_of_its_paper() -> None:
    """Yu et al. 2025: ε_low 0.2 and ε_high 0.28 (sections 3.1 and 4.1), dynamic sampling (3.2), token-level loss (3.3),
    soft overlong punishment with a cache of 4,096 of 20,480 tokens (3.4 and 4.1), no KL (2.3), and advantages that are
    standardized in the group (equation 9)."""
    config = chosen("dapo")
    loss, training = config.loss, config.training
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.28)
    assert (loss.normalize, loss.advantage_estimator, loss.kl) == ("token", "group_std", 0)
    assert config.drops_equal_groups
    assert (training.overlong_buffer, training.overlong_penalty) == (4096 / 20480, 1)


def test_dr_grpo_divides_neither_by_deviation_nor_by_length() -> None:
    """Liu et al. 2025, section 3.2: advantages without the standard deviation, a constant divisor, and no KL."""
    loss = chosen("dr_grpo").loss
    assert (loss.advantage_estimator, loss.normalize, loss.kl) == ("group", "fixed", 0)
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.2)


def test_gspo_has_the_clip_range_of_sequences() -> None:
    """Zheng et al. 2025, section 5.1: left and right clipping ranges 3e-4 and 4e-4; equation 5: the mean over samples
    of a ratio that is normalized by length."""
    loss = chosen("gspo").loss
    assert (loss.clip_low, loss.clip_high, loss.normalize) == (3e-4, 4e-4, "sequence")
    assert (loss.advantage_estimator, loss.kl) == ("group_std", 0)


def test_cispo_bounds_weights_from_above_alone() -> None:
    """MiniMax-M1, Chen et al. 2025, section 3.1: no lower bound on the weight, a mean over tokens, no KL, and the
    dynamic sampling of DAPO. The paper does not give its upper bound; this one is that of ScaleRL (Khatri et al.
    2025)."""
    config = chosen("cispo")
    assert (1 - config.loss.clip_low, 1 + config.loss.clip_high) == (0, 5)
    assert (config.loss.normalize, config.loss.kl) == ("token", 0)
    assert config.drops_equal_groups


@pytest.mark.parametrize(
    ("keys", "dropped"),
    [
        ([], True),
        (["loss.kl=0.1"], False),
        (["loss.entropy=0.01"], False),
        (["loss.advantage_estimator=batch"], False),
        (["training.zero_variance_groups=keep"], False),
        (["loss.kl=0.1", "training.zero_variance_groups=drop"], True),
    ],
)
def test_groups_with_equal_rewards_are_dropped_where_they_have_no_gradient(keys: list[str], dropped: bool) -> None:
    assert chosen("grpo", *keys).drops_equal_groups is dropped


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (16384, 0), (18432, 0.5), (20480, 1), (30000, 1)])
def test_the_overlong_punishment_is_the_paper_s(length: int, penalty: float) -> None:
    """Yu et al. 2025, equation 13 and section 4.1: a penalty from 16,384 tokens on, in full at 20,480."""
    assert overlong_penalty(length, 20480, 0.2, truncated=False) == pytest.approx(penalty)
    assert overlong_penalty(length, 20480, 0.2, truncated=True) == 1
    assert overlong_penalty(length, 20480, 0.0, truncated=True) == 0
