"""Kept samples, found again: filters, order, the ledger's word, the terminal and the page."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from pyarrow import parquet

from pipeline.config.model_directory import BUILT_IN
from pipeline.observability.conversation_view import Passage, SampleReader
from pipeline.observability.report_page import page, state, tiles
from pipeline.observability.run_history import read_history
from pipeline.observability.sample_gallery import gallery, phases
from pipeline.observability.sample_reader import Filter, SampleTable, read_samples
from pipeline.observability.samples_command import main
from pipeline.rollout.sample_store import SampleStore, records_of_evaluation, records_of_group, segments
from pipeline.run.metrics_log import MetricSinks
from pipeline.transport.ledger import Settlement
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from pipeline.utils.terminal import escape_controls
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.unit.rollout.test_group_rollout import CHAT

TRAINED = 12
"""Positions that the ledger knows; one more is not trained yet."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to import Arrow."""
    monkeypatch.setattr("pipeline.rollout.sample_store.CLOSE_SECONDS", 60.0)


def a_sample(position: int, reward: float, *, cut: bool = False) -> Sample:
    asked, said = CHAT.encode(f"^{position}+1="), CHAT.encode("7$" if not cut else "777")
    tokens = [*asked, *said]
    return Sample(
        tokens=np.array(tokens, "<i4").tobytes(),
        sampled=np.array([0] * len(asked) + [1] * len(said), "u1").tobytes(),
        logprobs=np.array([0.0] * len(asked) + [-0.5] * len(said), "<f4").tobytes(),
        reward=reward,
        version_min=position // 2,
        version_max=position // 2,
        finish="length" if cut else "stop",
        metrics={"rewards/exact": reward},
    )


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Positions 0 … 12 with rewards of position / 10 and 0, the last sample cut off; each third has a failure."""
    model = {"path": str(BUILT_IN / "tiny_qwen3"), "init": "random"}
    made = FakeRun(tmp_path / "demo", make_config(name="demo", model=model))
    with SampleStore(made.paths.rollouts / "train", "a-0", 1 << 20) as kept:
        for position in range(TRAINED + 1):
            samples = a_sample(position, position / 10), a_sample(position, 0.0, cut=True)
            failures = ("reward raised ZeroDivisionError: <b>no</b>",) if position % 3 == 0 else ()
            group = Group(position=position, prompt=position, samples=samples, failures=failures)
            kept.add(records_of_group(PreparedGroup(group=group, advantages=(1.0, -1.0)), "sums", "group"))
    with SampleStore(made.paths.rollouts / "eval", "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation([[a_sample(3, 5.0)], ["not done by the deadline"]], "other", "hard"))
    lines = [Settlement(position=place, outcome="trained", step=place // 2 + 1) for place in range(TRAINED)]
    made.paths.ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"position":')
    return made


@pytest.fixture
def kept(run: FakeRun) -> SampleTable:
    return read_samples(run.paths)


def places(found: SampleTable) -> list[tuple[int, int]]:
    return [(sample["position"], sample["sample"]) for sample in found.load()]


def test_samples_of_a_refused_sampling_are_not_shown_as_trained(run: FakeRun) -> None:
    """The position was sampled twice, and the ledger has the fingerprint of the second time."""
    second = Group(position=5, prompt=5, samples=(a_sample(6, 0.7), a_sample(6, 0.0)), failures=())
    with SampleStore(run.paths.rollouts / "train", "a-1", 1 << 20) as kept:
        kept.add(records_of_group(PreparedGroup(group=second, advantages=(1.0, -1.0)), "sums", "group"))
    line = Settlement(position=5, outcome="trained", step=4, versions=(3, 3), fingerprint=second.fingerprint())
    with run.paths.ledger.open("ab") as ledger:
        ledger.write(b"\n" + msgspec.json.encode(line) + b"\n")
    found = read_samples(run.paths).where(Filter(position=5, least_reward=0.1)).load()
    assert {(sample["reward"], sample.step, sample.lag) for sample in found} == {(0.5, None, None), (0.7, 4, 1)}


def test_every_sample_is_found_whole(kept: SampleTable) -> None:
    assert len(kept) == 13 * 2 + 5 + 2
    (sample,) = kept.where(Filter(position=4, kind="train", least_reward=0.1)).load()
    assert CHAT.decode(sample["tokens"]) == "^4+1=7"
    assert (sample["mask"], sample["logprobs"][-1], sample["metrics"]) == (
        [0] * 5 + [1, 1],
        -0.5,
        {"rewards/exact": 0.4},
    )


def test_the_ledger_says_which_step_trained_a_sample_and_with_which_lag(kept: SampleTable) -> None:
    (trained,) = kept.where(Filter(position=5, least_reward=0.1)).load()
    assert (trained.step, trained.lag, trained.outcome) == (3, 1, "trained")
    (waiting,) = kept.where(Filter(position=TRAINED, least_reward=0.1)).load()
    assert (waiting.step, waiting.lag, waiting.outcome) == (None, None, "")
    (evaluated,) = kept.where(Filter(eval_set="hard", least_reward=0)).load()
    assert (evaluated.step, evaluated.lag) == (None, None)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (Filter(kind="train"), 31),
        (Filter(kind="eval"), 2),
        (Filter(task="other"), 2),
        (Filter(least_reward=1.1, most_reward=1.2), 2),
        (Filter(failed=True), 6),
        (Filter(failure="zerodivision"), 5),
        (Filter(cut=True), 13),
        (Filter(cut=True, first_version=6), 1),
        (Filter(most_length=7, kind="train"), 10),
        (Filter(last_version=0, kind="train"), 4),
        (Filter(position=99), 0),
    ],
)
def test_filters_choose_what_they_say_and_all_of_them_hold(kept: SampleTable, wanted: Filter, count: int) -> None:
    assert len(kept.where(wanted)) == count


def test_the_best_and_the_worst_are_by_reward_and_a_failure_is_neither(kept: SampleTable) -> None:
    train = kept.where(Filter(kind="train"))
    assert places(train.best(2)) == [(12, 0), (11, 0)]
    assert {sample["reward"] for sample in train.worst(3).load()} == {0.0}
    assert len(train.best(1000)) == 26


def test_a_segment_that_is_torn_or_goes_meanwhile_is_passed_over(run: FakeRun) -> None:
    torn = segments(run.paths.rollouts / "eval")[0]
    torn.write_bytes(torn.read_bytes()[:100])
    left = read_samples(run.paths)
    assert len(left) == 31
    segments(run.paths.rollouts / "train")[0].unlink()
    assert list(left.load()) == []


def test_the_terminal_shows_turns_numbers_and_how_many_there_were(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"run={run.root}", "--train", "--best", "1"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "sums · position 12 · sample 0",
        "reward 1.2",
        "^12+1=",
        "7$",
        "rewards/exact 1.2",
        "advantage +1.000",
    ):
        assert part in shown
    counts = "1 of 31 matching samples, of 33 stored; page 1 of 26; --page 2 shows the next"
    assert " ".join(shown.split()).endswith(counts)


def test_tokens_are_shown_with_mask_and_log_probability(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"run={run.root}", "--position", "4", "--reward", "0.4:", "--train", "--tokens"]) == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[2:] for line in lines if line.endswith("'7'")] == [["1", "-0.5000", "'7'"]]
    assert [line.split()[2:] for line in lines if line.endswith("'='")] == [["0", "'='"]]


def test_every_row_of_an_episode_is_shown(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    said = CHAT.encode("8$")
    branch = Branch(
        of=0,
        shared=2,
        tokens=np.array(said, "<i4").tobytes(),
        sampled=np.array([0, 1], "u1").tobytes(),
        logprobs=np.array([0.0, -0.25], "<f4").tobytes(),
    )
    with SampleStore(run.paths.rollouts / "eval", "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation([[structs.replace(a_sample(9, 2.0), branches=(branch,))]], "sums", "branched"))
    assert main([f"run={run.root}", "--set", "branched"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("row 1 of 2") < shown.index("7$") < shown.index("row 2 of 2") < shown.index("^98")
    assert main([f"run={run.root}", "--set", "branched", "--tokens"]) == 0
    assert [line.strip("│ ").split()[-2:] for line in capsys.readouterr().out.splitlines() if "'$'" in line] == [
        ["-0.5000", "'$'"],
        ["-0.2500", "'$'"],
    ]
    assert main([f"run={run.root}", "--set", "branched", "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["conversation"]
    assert [turn["row"] for turn in turns if turn["role"] == "assistant"] == [0, 1]


def test_samples_that_were_kept_before_rows_were_counted_are_read(run: FakeRun) -> None:
    (segment,) = segments(run.paths.rollouts / "eval")
    parquet.write_table(parquet.read_table(segment).drop_columns(["row_lengths"]), segment)
    (sample,) = read_samples(run.paths).where(Filter(eval_set="hard", least_reward=0)).load()
    assert [CHAT.decode(row.tokens) for row in sample.rows()] == ["^3+1=7"]


def test_the_tokenizer_is_read_once_for_all_samples(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Path]()

    class Counted(SampleReader):
        def __init__(self, directory: Path) -> None:
            read.append(directory)
            super().__init__(directory)

    monkeypatch.setattr("pipeline.observability.samples_command.SampleReader", Counted)
    assert main([f"run={run.root}", "--json", "--all"]) == 0
    assert len(read) == 1


def test_scripts_get_one_json_object_a_line(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"run={run.root}", "--json", "--cut", "--last", "2"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["position"], each["step"], each["finish"]) for each in found] == [
        (11, 6, "length"),
        (12, None, "length"),
    ]
    assert found[0]["conversation"][-1] == {"row": 0, "role": "assistant", "text": "777"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--reward", "3"], "'3' is no range LOW:HIGH"),
        (["--reward", "nan:"], "'nan:' is no range LOW:HIGH"),
        (["--best", "0"], "'0' is no number above 0"),
        (["--best", "1" + "0" * 25], "'10000000000000000000000000' is no number of at most 15 digits"),
        (["--position", "1" + "0" * 25], "'10000000000000000000000000' is no number of at most 15 digits"),
        (["--bset", "1"], "option='--bset': expected one that --help lists"),
        (["--best", "1", "--worst", "1"], "not allowed with"),
    ],
)
def test_a_wrong_option_is_one_line(
    run: FakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main([f"run={run.root}", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_run_that_kept_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = FakeRun(tmp_path / "empty")
    assert main([f"run={empty.root}"]) == 2
    assert "unless rollout.sample_store_bytes=0" in capsys.readouterr().err
    assert gallery(read_history(empty.root)) == ([], "")


def test_the_page_has_samples_of_each_phase_and_runs_none_of_their_text(run: FakeRun) -> None:
    shown = dict(phases(read_samples(run.paths).where(Filter(kind="train"))))
    assert [title.partition(":")[0] for title in shown] == ["Begin", "Middle", "End"]
    assert [sample["position"] for sample in shown[list(shown)[-1]]["best"]] == [12, 11]
    assert all(chosen["cut off"] and chosen["worst"] for chosen in shown.values())
    text = page(read_history(run.root))
    for part in ("Rewards over time", "Lengths over time", "^12+1=", "&lt;b&gt;no&lt;/b&gt;"):
        assert part in text
    assert "<b>no</b>" not in text


def test_a_run_whose_model_is_gone_shows_its_samples_without_text(run: FakeRun, tmp_path: Path) -> None:
    gone = make_config(name="demo", model={"path": str(tmp_path / "gone")})
    from pipeline.utils import shared_files

    shared_files.write_document(run.paths.config, gone.model_dump(mode="json"))
    assert "its tokens have no text" in page(read_history(run.root))
    assert main([f"run={run.root}", "--last", "1", "--train"]) == 0


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_model(folder: Path, template: str) -> Path:
    """The tokenizer of tiny_text, whose vocabulary is characters, with a template."""
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((BUILT_IN / "tiny_text" / file).read_bytes())
    settings: dict[str, Any] = json.loads((BUILT_IN / "tiny_text" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def test_what_was_given_is_cut_where_the_template_begins_a_message(tmp_path: Path) -> None:
    reader = SampleReader(a_model(tmp_path, CHATML))
    given = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert [part.role for part in reader._input_parts(given)] == ["system", "user", "assistant"]
    assert "".join(part.text for part in reader._input_parts(given)) == given


def test_a_built_in_models_turns_are_told_apart_by_mask_and_template() -> None:
    reader = SampleReader(BUILT_IN / "tiny_qwen3")
    tokens = CHAT.encode("^2+2=4$")
    assert reader.parts(tokens, [0] * 5 + [1, 1]) == [
        Passage("prompt", "^2+2=", False),
        Passage("assistant", "4$", True),
    ]
    assert SampleReader(Path("/nowhere")).parts([5, 6], [0, 1]) == [
        Passage("prompt", "5", False),
        Passage("assistant", "6", True),
    ]


def test_a_terminal_shows_what_was_sampled_and_does_not_obey_it() -> None:
    assert escape_controls("naïve\t数\n") == "naïve\t数\n"
    assert escape_controls("\x1b]0;title\x07") == "␛]0;title␇"
    assert escape_controls("\x9b2J\x7f\u202e") == "\\u009b2J\\u007f\\u202e"


def test_the_page_of_a_run_that_only_evaluates_has_its_sets_and_no_training(tmp_path: Path) -> None:
    sets = {"hard": {"samples": 2, "temperature": 1.0}}
    alone = {"only": True, "step": 5, "sets": sets}
    model = {"path": str(BUILT_IN / "tiny_qwen3"), "init": "random"}
    training = {"steps": 0, "prompts_per_step": 1}
    made = FakeRun(tmp_path / "e", make_config(name="e", model=model, training=training, evaluation=alone))
    with SampleStore(made.paths.rollouts / "eval", "a-0", 1 << 20) as kept:
        kept.add(records_of_evaluation([[a_sample(3, 1.0), a_sample(3, 0.0)]], "sums", "hard"))
    attempt = made.attempt("a-0")
    attempt.meet()
    attempt.all_roles("starting")
    assert state(read_history(made.root)) == "starting"
    attempt.all_roles("ready")
    with MetricSinks(made.paths.metrics, "a-0") as sinks:
        sinks.log("eval", "rl", 5, {"eval/hard/accuracy": 0.5, "eval/hard/stderr": 0.1}, eval_set="hard")
    history = read_history(made.root)
    assert state(history) == "evaluating"
    assert ("50.0% ± 10.0%", "accuracy on hard") in tiles(history)
    text = page(history)
    assert "hard: 2 samples kept" in text
    assert "steps of SFT" not in text
