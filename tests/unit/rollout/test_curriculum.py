"""Prompts that are too easy or too hard come less often, and what was chosen stays."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from pipeline.config.rollout_keys import CurriculumConfig
from pipeline.environments.task_protocol import TaskPart
from pipeline.errors import RecordError
from pipeline.rollout.curriculum import MAX_KEPT, MAX_SKIPPED, Curriculum, SolveStreaks
from pipeline.rollout.prompt_order import PromptOrder
from pipeline.transport.ledger import Ledger, Settlement
from tests.unit.rollout.test_prompt_order import Parted

SIZE, WINDOW = 16, 32
ALONE = Parted(size=SIZE)
MIX = Parted(TaskPart("sums", 3, SIZE), TaskPart("words", 1, 1000))


def a_curriculum(folder: Path, task: Parted = ALONE, weight: float = 0.25, tries: int = 2) -> Curriculum:
    keys = CurriculumConfig(weight=weight, tries=tries)
    run = folder / "ledger.jsonl"
    return Curriculum(PromptOrder(task, 7), keys, 7, WINDOW, folder / "curriculum", run)


def windows(curriculum: Curriculum, first: int, count: int) -> list[int]:
    return [curriculum.at(position) for position in range(first * WINDOW, (first + count) * WINDOW)]


def test_a_streak_of_solved_or_unsolved_groups_makes_a_prompt_extreme_and_one_other_ends_it() -> None:
    streaks = SolveStreaks(tries=2)
    seen = []
    for solved in (0.0, 0.0, 0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0):
        streaks.note(3, solved)
        seen.append(streaks.is_extreme(3))
    assert seen == [False, True, False, False, True, False, False, True, True]
    assert not streaks.is_extreme(4)
    streaks.note(5, 0.0)
    streaks.note(5, 0.0)
    assert streaks.numbers() == {"curriculum/easy": 1, "curriculum/hard": 1}


def test_without_extreme_prompts_the_order_is_that_of_the_task(tmp_path: Path) -> None:
    order = PromptOrder(ALONE, 7)
    assert windows(a_curriculum(tmp_path), 0, 2) == [order.at(position) for position in range(2 * WINDOW)]


def test_prompts_that_are_too_easy_or_too_hard_come_about_as_often_as_their_weight_says(tmp_path: Path) -> None:
    curriculum = a_curriculum(tmp_path)
    for solved, prompts in ((1.0, range(4)), (0.0, range(4, 8)), (0.5, range(8, SIZE))):
        for prompt in prompts:
            curriculum.note(prompt, solved)
            curriculum.note(prompt, solved)
    counts = Counter(windows(curriculum, 0, 100))
    ordinary = sum(counts[prompt] for prompt in range(8, SIZE)) / 8
    for prompts in (range(4), range(4, 8)):
        extreme = sum(counts[prompt] for prompt in prompts) / 4
        assert 0.2 < extreme / ordinary < 0.3
    assert min(counts[prompt] for prompt in range(SIZE)) > 0, "none is given up"


def test_the_weights_of_a_mix_stay_as_they_are(tmp_path: Path) -> None:
    curriculum, order = a_curriculum(tmp_path, MIX, weight=0.01), PromptOrder(MIX, 7)
    for prompt in range(SIZE - 1):
        curriculum.note(prompt, 1.0)
        curriculum.note(prompt, 1.0)
    chosen = windows(curriculum, 0, 20)
    labels = [order.label(prompt) for prompt in chosen]
    assert labels == [MIX.parts[order.turn(position)[0]].label for position in range(20 * WINDOW)]
    sums = Counter(prompt for prompt in chosen if prompt < SIZE)
    assert sums[SIZE - 1] > 0.8 * sums.total()
    words = [prompt for prompt in chosen if prompt >= SIZE]
    assert len(set(words)) == len(words) == 5 * WINDOW, "another task skips nothing"


def test_a_curriculum_where_every_prompt_is_extreme_still_chooses(tmp_path: Path) -> None:
    curriculum = a_curriculum(tmp_path, weight=1e-300)
    for prompt in range(SIZE):
        curriculum.note(prompt, 0.0)
        curriculum.note(prompt, 0.0)
    assert len(windows(curriculum, 0, 1)) == WINDOW
    recorded = msgspec.json.decode((tmp_path / "curriculum" / "00000000.json").read_bytes())
    assert recorded["body"]["turns"] == [WINDOW * (MAX_SKIPPED + 1)]


def test_a_resumed_run_has_the_recorded_prompts_whatever_it_has_learned_since(tmp_path: Path) -> None:
    first = a_curriculum(tmp_path)
    chosen = windows(first, 0, 2)
    for prompt in range(SIZE // 2):
        first.note(prompt, 1.0)
        first.note(prompt, 1.0)
    chosen += windows(first, 2, 1)
    resumed = a_curriculum(tmp_path)  # has seen nothing
    positions = [70, 3, 95, 40, 0]
    assert [resumed.at(position) for position in positions] == [chosen[position] for position in positions]
    assert windows(resumed, 0, 3) == chosen


def test_the_next_window_of_a_resumed_run_goes_on_with_what_the_ledger_has(tmp_path: Path) -> None:
    """As the run would have without the interruption, if both know the same."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    ledger = Ledger()
    uninterrupted, interrupted = a_curriculum(whole), a_curriculum(part)
    for position, prompt in enumerate(windows(uninterrupted, 0, 2)):
        solved = 1.0 if prompt < SIZE // 2 else 0.25
        uninterrupted.note(prompt, solved)
        ledger.mark_done(position, "trained", position // 8, None, prompt, solved)
    ledger.mark_done(1000, "failed: no samples", 9, None, 3, None)
    assert windows(interrupted, 0, 2) == windows(uninterrupted, 0, 2)
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in ledger.drain_changes())
    (part / "ledger.jsonl").write_bytes(lines + b'{"position":1001,"outc')
    resumed = a_curriculum(part)
    chosen = windows(resumed, 2, 3)
    assert chosen == windows(uninterrupted, 2, 3)
    assert sum(prompt < SIZE // 2 for prompt in chosen) < 0.35 * len(chosen)
    (tmp_path / "new").mkdir()
    assert chosen != windows(a_curriculum(tmp_path / "new"), 2, 3)


def test_of_two_actors_that_choose_at_once_the_first_counts(tmp_path: Path) -> None:
    one, other = a_curriculum(tmp_path), a_curriculum(tmp_path)
    for prompt in range(SIZE // 2):
        other.note(prompt, 1.0)
        other.note(prompt, 1.0)
    first = windows(one, 0, 1)
    assert windows(other, 0, 1) == first
    second = windows(other, 1, 1)
    assert windows(one, 1, 1) == second


def test_windows_before_the_one_that_is_needed_are_chosen_too(tmp_path: Path) -> None:
    late = a_curriculum(tmp_path)
    late.at(200 * WINDOW)
    assert len(list((tmp_path / "curriculum").iterdir())) == 201
    order = PromptOrder(ALONE, 7)
    assert a_curriculum(tmp_path).at(70 * WINDOW + 5) == order.at(70 * WINDOW + 5)


def test_a_position_that_is_issued_again_long_after_it_was_chosen_has_its_prompt(tmp_path: Path) -> None:
    curriculum, order = a_curriculum(tmp_path), PromptOrder(ALONE, 7)
    for number in range(MAX_KEPT + 10):
        curriculum.at(number * WINDOW)
    for position in (3, WINDOW + 3, (MAX_KEPT + 9) * WINDOW, 5):
        assert curriculum.at(position) == order.at(position)
    assert len(curriculum._chosen) <= MAX_KEPT


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"length": 2, "crc32": "00000000", "body": {}}\n'])
def test_a_damaged_record_is_an_error_and_nothing_is_chosen_in_its_place(tmp_path: Path, damage: bytes) -> None:
    windows(a_curriculum(tmp_path), 0, 1)
    record = tmp_path / "curriculum" / "00000000.json"
    record.write_bytes(damage)
    with pytest.raises(RecordError, match=f"{record} is damaged: expected {WINDOW} prompts"):
        a_curriculum(tmp_path).at(0)
    assert record.read_bytes() == damage


def test_a_damaged_line_of_the_ledger_costs_only_itself(tmp_path: Path) -> None:
    ledger = Ledger()
    for position in range(4):
        ledger.mark_done(position, "trained", 1, None, prompt=3, solved=1.0)
    first, second, *lines = map(msgspec.json.encode, ledger.drain_changes())
    torn = first[:20] + second
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join([torn, b"\xff\xfe", *lines, b""]))
    curriculum = a_curriculum(tmp_path)
    curriculum.at(0)
    assert curriculum.numbers() == {"curriculum/easy": 1, "curriculum/hard": 0}


def test_a_line_of_the_ledger_keeps_what_was_solved() -> None:
    ledger = Ledger()
    ledger.mark_done(4, "trained", 2, None, prompt=9, solved=0.75)
    ledger.mark_done(5, "failed: x", 2)
    lines = [msgspec.json.encode(line) for line in ledger.drain_changes()]
    assert [msgspec.json.decode(line, type=Settlement).solved for line in lines] == [0.75, None]
    assert b"solved" not in lines[1]
