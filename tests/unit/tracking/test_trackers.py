"""The list of trackers, the mode of each, and the refusal of an unknown name."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.tracking.metric_sinks import chosen_mode
from pipeline.tracking.tracker_protocol import Tracker, check_trackers, numbers_of, tracker_class, tracker_names
from pipeline.tracking.trackers.wandb import Tracker as Wandb
from tests.fakes.configs import make_config


@pytest.mark.parametrize("name", tracker_names())
def test_every_module_of_trackers_is_a_tracker(name: str) -> None:
    kind = tracker_class(name)
    assert issubclass(kind, Tracker)
    assert not kind.__abstractmethods__
    assert kind.package


def test_an_unknown_tracker_is_refused_with_the_nearest_name() -> None:
    check_trackers(make_config())
    check_trackers(make_config(tracking={"trackers": ()}))
    with pytest.raises(ConfigError) as refused:
        check_trackers(make_config(tracking={"trackers": "wandbb"}))
    expected = "expected names of wandb, or an empty list; did you mean wandb?"
    assert str(refused.value) == f"tracking.trackers='wandbb': {expected}"


@pytest.mark.parametrize("setting", ["online", "offline"])
def test_a_mode_that_is_set_is_taken_whatever_the_login(setting: str, tmp_path: Path) -> None:
    for variables in ({}, {"WANDB_API_KEY": "key"}):
        assert chosen_mode(setting, Wandb, variables, tmp_path) == setting


def test_auto_is_online_with_a_key_or_a_login_and_else_offline(tmp_path: Path) -> None:
    assert chosen_mode("auto", Wandb, {}, tmp_path) == "offline"
    assert chosen_mode("auto", Wandb, {"WANDB_API_KEY": "key"}, tmp_path) == "online"
    (tmp_path / ".netrc").write_text("machine elsewhere.example login a password b\n")
    assert chosen_mode("auto", Wandb, {}, tmp_path) == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert chosen_mode("auto", Wandb, {}, tmp_path) == "online"


def test_rows_of_sft_have_an_axis_and_names_apart() -> None:
    row = {"kind": "train", "job": "sft", "step": 3, "time": 9.0, "attempt": "12-0", "loss": 0.5, "lr": None}
    assert numbers_of(row) == {"sft/loss": 0.5, "sft/step": 3}
    assert numbers_of(row | {"job": "rl"}) == {"loss": 0.5, "step": 3}
