"""The keys of `debug`: what a run cannot trace or debug is refused in one line with its fix."""

import pytest

from pipeline.config import debug_checks
from pipeline.config.cross_checks import check_run
from pipeline.config.debug_keys import in_window
from pipeline.errors import ConfigError
from tests.fakes.composed_config import compose_cached

SFT = ("training.steps=0", "training.sft.steps=5")
GPU = ("resources.device=cuda", "resources.trainer.gpus=1", "resources.inference.gpus=1")


@pytest.mark.parametrize(
    "overrides",
    [
        ["debug.profile_steps=[5,7]", "debug.role=trainer", "debug.log_level=debug"],
        [*GPU, "debug.memory_steps=[5,5]"],
        ["resources.trainer.processes=2", "debug.role=trainer.1"],
        ["debug.role=preprocessor", "debug.log_modules=[pipeline.transport,aiohttp]"],
        [*SFT, "debug.profile_steps=[5,5]", "debug.role=trainer"],
    ],
)
def test_what_can_be_traced_or_debugged_passes(overrides: list[str]) -> None:
    check_run(compose_cached(["experiment=demo", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["debug.profile_steps=[7,5]"], "[FIRST, LAST] with FIRST ≤ LAST; set debug.profile_steps=[5,7]"),
        (["debug.profile_steps=[5]"], "expected [FIRST, LAST]; set debug.profile_steps=[5,5] for one step"),
        (["debug.profile_steps=[151,152]"], "expected steps up to 150, the last one of the run"),
        ([*SFT, "debug.profile_steps=[6,6]"], "expected steps up to 5, the last one of the run"),
        (["experiment=tinker", "debug.profile_steps=[1,2]"], "steps are those of job files, clients or an evaluation"),
        (["debug.memory_steps=[5,7]"], "torch records the allocations of GPUs only; leave it out"),
        (["debug.role=trianer"], "debug.role='trianer': expected a role of this run that is a Python program"),
        (["debug.role=inference"], "trainer, actor, preprocessor; for servers, see inference.extra_args"),
        (["debug.role=trainer.1"], "debug.role='trainer.1': expected a role of this run"),
        (["debug.role=actor.x"], "debug.role='actor.x': expected a role of this run"),
        ([*SFT, "debug.role=actor"], "Python program of Rollcall: trainer; for servers"),
    ],
)
def test_what_cannot_be_traced_or_debugged_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_run(compose_cached(["experiment=demo", *overrides]))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("debug.log_level=trace", "expected 'debug', 'info', 'warning' or 'error'"),
        ("debug.profile_steps=[0,2]", "greater than 0"),
        ("debug.profile_steps=[1,2,3]", "at most 2 items"),
        ("debug.port=80", "greater than or equal to 1024"),
        ("debug.tool=gdb", "expected 'pdb' or 'debugpy'"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_cached(["experiment=demo", override])
    assert message in str(refused.value)


def test_a_window_has_its_first_and_its_last_step_and_an_empty_one_has_none() -> None:
    assert [step for step in range(10) if in_window((5, 7), step)] == [5, 6, 7]
    assert not any(in_window((), step) for step in range(10))


def test_an_ide_s_debugger_that_is_not_installed_is_refused_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_checks, "find_spec", {"debugpy": None}.get)
    with pytest.raises(ConfigError, match=r"debugpy is not installed; .* -m pip install 'debugpy>=1.8', or leave"):
        check_run(compose_cached(["experiment=demo", "debug.role=actor", "debug.tool=debugpy"]))
