"""The page of recovery trials, from the rows of its runs."""

from pathlib import Path

from pipeline.config.fault_checks import faults_can_happen
from pipeline.run.fault_plan import ROLES as FAULT_ROLES
from pipeline.run.fault_plan import parse_faults
from slurm.submission.compose_config import compose_config
from tests.recovery.trial_page import KINDS, PHASES, RecoveryTrial, page
from tests.recovery.trials import RESULTS, ROLES, SUBJECTS, planned, read_trials, trials_of

PAGE = Path("docs/recovery.md")


def test_the_page_shows_the_recorded_rows() -> None:
    assert PAGE.read_text() == page(read_trials(RESULTS))


def test_the_runs_have_every_role_kind_and_phase_once() -> None:
    trials = [trial for role in ROLES for trial in trials_of(role, tuple(KINDS), tuple(PHASES))]
    combinations = sorted((trial.role, trial.kind, trial.phase) for trial in trials)
    assert combinations == sorted((role, kind, phase) for role in FAULT_ROLES for kind in KINDS for phase in PHASES)


def test_every_trial_is_a_fault_that_can_happen() -> None:
    plans = [planned(trials_of(subject, tuple(KINDS), tuple(PHASES))) for subject in SUBJECTS]
    texts = [[fault.text for fault in faults] for faults in plans]
    assert [len(set(parse_faults(faults))) for faults in texts] == [len(faults) for faults in texts]
    run = compose_config(["experiment=demo", "training.steps=40", "training.sft.steps=4"])
    for faults in texts:
        faults_can_happen(run.model_copy(update={"faults": faults}))


def test_a_hang_and_a_difference_are_counted_as_such() -> None:
    whole = RecoveryTrial(role="actor", kind="kill", phase="save", outcome="restarted", detected=0.1, recovered=4.04)
    ended = RecoveryTrial(role="actor", kind="kill", phase="start", outcome="ended", detected=0.31)
    hung = RecoveryTrial(scheduler="Slurm", role="redis", kind="stop", phase="end", problem="TimeoutExpired: 1 s")
    text = page([hung, ended, whole])
    counts = "1 with a restart in place, 1 with the end of the attempt; 1 left a run that hung."
    assert f"2 of 3 faults left a whole run: {counts}" in text
    assert "| local | actor | SIGKILL | ended 0.3 s | — | — | — | — | 4.0 s | — |" in text
    assert "| Slurm | redis | SIGSTOP | — | — | — | — | — | — | **TimeoutExpired: 1 s** |" in text
