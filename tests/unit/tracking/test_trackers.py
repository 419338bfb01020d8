"""The list of trackers, the mode of each, and the refusal of an unknown name."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.run.paths import AttemptPaths
from pipeline.tracking import tracker_protocol
from pipeline.tracking.metric_sinks import chosen_mode, tracking_sinks
from pipeline.tracking.tracker_protocol import (
    Tracker,
    check_trackers,
    metrics_of,
    numbers_of,
    tracker_class,
    tracker_names,
)
from pipeline.tracking.trackers.wandb import Tracker as Wandb
from slurm.submission.compose_config import compose_config
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun


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
    expected = f"expected names of {', '.join(tracker_names())}, or an empty list; did you mean wandb?"
    assert str(refused.value) == f"tracking.trackers='wandbb': {expected}"


def test_a_tracker_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected each name once; leave out one wandb"):
        check_trackers(make_config(tracking={"trackers": ["wandb", "wandb"]}))


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
    assert metrics_of(row) == {"sft/loss": 0.5}


@pytest.mark.parametrize(
    ("tracker", "project", "is_accepted"),
    [
        ("wandb", "a team", True),
        ("wandb", "a/team", False),
        ("wandb", "a" * 129, False),
        ("wandb", "", False),
        ("swanlab", "a-team", True),
        ("swanlab", "a team", False),
        ("tensorboard", "a/team", True),
    ],
)
def test_a_project_whose_name_the_service_refuses_is_refused_at_submission(
    tracker: str, project: str, is_accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_protocol, "is_installed", lambda package: True)
    config = make_config(tracking={"trackers": [tracker], "project": project})
    with nullcontext() if is_accepted else pytest.raises(ConfigError, match=f"tracking.project.*for {tracker}$"):
        check_trackers(config)


def test_a_run_that_has_begun_keeps_its_project_and_a_tracker_that_it_names_twice(tmp_path: Path) -> None:
    tracking = {"trackers": ["wandb", "wandb"], "project": "a/team"}
    config = make_config(tracking=tracking, output=str(tmp_path), name="begun")
    with pytest.raises(ConfigError, match="each name once"):
        check_trackers(config)
    run = FakeRun(config.directory, config)
    check_trackers(config)
    sinks = tracking_sinks(config, AttemptPaths(run.root, run.identity.run_id, "12-0"), {"PATH": ""}, seconds=0.0)
    for sink in sinks:
        sink.close()
    assert len(sinks) == 1


def test_a_tracker_without_its_package_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError) as refused:
        check_trackers(make_config(tracking={"trackers": ["wandb", "tensorboard"]}))
    assert "expected the installed package tensorboard" in str(refused.value)
    assert "pip install" in str(refused.value)
    assert "the extra `tensorboard`" in str(refused.value)


def test_several_files_of_the_group_are_one_list() -> None:
    assert compose_config(["name=a", "tracking=[wandb,tensorboard]"]).tracking.trackers == ("wandb", "tensorboard")
    assert compose_config(["name=a", "tracking=tensorboard"]).tracking.trackers == ("tensorboard",)
