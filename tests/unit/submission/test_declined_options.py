"""What users of Hydra and submitit type, and what they are told."""

from pathlib import Path

import pytest

from pipeline.config import known_keys
from pipeline.errors import ConfigError
from slurm.submission import declined_options, submit_run

DOC = Path(__file__).resolve().parents[3] / "docs" / "sweeps.md"
RUN = ("experiment=demo", "cluster=slurm", "--dry-run")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--info"], "option='--info': expected one of"),
        (["--config-name=mine"], "experiment=<name> chooses conf/experiment/<name>.yaml"),
        (["-cn", "mine"], "experiment=<name> chooses"),
        (["-m", "hydra/launcher=submitit_slurm", "seed=1,2"], "leave it out and set cluster=slurm"),
        (["-m", "hydra.launcher.partition=gpu", "seed=1,2"], "hydra.launcher.partition='gpu'"),
        (["hydra.launcher.array_parallelism=4"], "set cluster.max_jobs"),
        (["--unheard-of"], "everything else is set as key=value"),
    ],
)
def test_it_is_refused_with_what_does_the_same(typed: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_run.main([*RUN, *typed]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_every_key_that_is_named_exists() -> None:
    known = known_keys()
    assert [
        ours for ours in declined_options.LAUNCHER_KEYS.values() if ours.removesuffix(".<option>") not in known
    ] == []


@pytest.mark.parametrize(
    "there", [*declined_options.OPTIONS, *declined_options.LAUNCHERS, *declined_options.LAUNCHER_KEYS]
)
def test_the_page_has_a_line_for_it(there: str) -> None:
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| `")]
    assert any(f"`{there}`" in row or f"={there}`" in row or f".{there}`" in row for row in rows)


def test_a_key_of_a_sweeper_is_no_concern_of_the_table() -> None:
    declined_options.refuse_launcher_key("hydra.sweeper.n_trials", "6")
    declined_options.refuse_launcher_key("hydra.launcher.objective", "loss")
    with pytest.raises(ConfigError, match=r"set cluster\.time"):
        declined_options.refuse_launcher_key("hydra.launcher.timeout_min", "60")
