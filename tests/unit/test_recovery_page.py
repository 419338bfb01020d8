"""The page of recovery trials, from the rows of its runs."""

from pathlib import Path

from pipeline.run.fault_plan import KINDS as FAULT_KINDS
from pipeline.run.fault_plan import TARGETS, parse_faults
from tests.recovery.trial_page import KINDS, PHASES, RecoveryTrial, page
from tests.recovery.trials import RESULTS, ROLES, read_trials

PAGE = Path("docs/recovery.md")


def test_the_page_shows_the_recorded_rows() -> None:
    assert PAGE.read_text() == page(read_trials(RESULTS))


def test_every_trial_is_a_fault_of_the_grammar() -> None:
    assert set(KINDS) <= set(FAULT_KINDS)
    for kind in KINDS:
        assert parse_faults(f"{kind}:{role}@{phase}" for role in TARGETS[kind] for phase in PHASES)
    assert set(ROLES) == set(TARGETS["kill"])


def test_a_hang_and_a_difference_are_counted_as_such() -> None:
    whole = RecoveryTrial(role="actor", kind="kill", phase="save", outcome="restarted", detected=0.1, recovered=4.04)
    hung = RecoveryTrial(role="redis", kind="stop", phase="end", problem="TimeoutExpired: 1 s")
    text = page([hung, whole])
    assert "1 of 2 faults ended as described, 1 with a restart; 1 left a run that hung." in text
    assert "| actor | SIGKILL | checkpoint | restarted | 0.1 s | 4.0 s | every step once |" in text
