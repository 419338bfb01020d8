"""Episodes in the terminal and on the page: turns, tools, times, search, pages; and hostile texts, which stay texts."""

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.observability import episode_section
from pipeline.observability.conversation_view import SampleReader
from pipeline.observability.episode_section import chosen, episodes_section
from pipeline.observability.episode_view import MAX_TEXT, duration, syntax_of, turn_facts, turns_of, visible
from pipeline.observability.report_page import write_report
from pipeline.observability.run_history import read_history
from pipeline.observability.sample_reader import Filter, read_samples
from pipeline.observability.samples_command import main
from pipeline.rollout.sample_store import SampleStore, records_of_evaluation, records_of_group, segments
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from pipeline.transport.turn_times import TurnTimes
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.support.browser import open_page
from tests.unit.environments.test_tool_task import bytes_model

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*52"}}\n</tool_call>'
RESULT = "<|im_end|>\n<|im_start|>user\n<tool_response>\n1924\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
HOSTILE = (
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!--<script>",
    "\x1b]0;taken\x07\x1b[2J\x9b2J",
    "\u202egnp.exe\u2066\u200f",
    "\u2028\u2029\0\r]]>&amp;&#60;b&#62;",
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to import Arrow."""
    monkeypatch.setattr("pipeline.rollout.sample_store.CLOSE_SECONDS", 60.0)


class Model:
    """A model of bytes, and samples of texts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = bytes_model(folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"model_type": "qwen3"}))
        self.chat = ChatTokenizer(self.folder)

    def sample(self, *texts: str, reward: float = 1.0, timed: bool = True, **changes: Any) -> Sample:
        """A prompt, and then the policy's turns and what follows each, in turn."""
        tokens, sampled, times = list[int](), list[int](), list[TurnTimes]()
        for index, text in enumerate(texts):
            own = self.chat.encode(text)
            if index % 2:
                tools = 0.03 if index < len(texts) - 1 else None
                times.append(TurnTimes(0, len(tokens), f"node-{index}:8000", 0.5 * index, 0.4, 0.002, 0.01, 0.1, tools))
            tokens, sampled = [*tokens, *own], [*sampled, *([index % 2] * len(own))]
        values = {
            "tokens": np.array(tokens, "<i4").tobytes(),
            "sampled": np.array(sampled, "u1").tobytes(),
            "logprobs": (np.array(sampled, "<f4") * -0.5).tobytes(),
            "version_offsets": np.array([mark * (place > 40) for place, mark in enumerate(sampled)], "u1").tobytes(),
            "version_min": 3,
            "version_max": 4,
            "finish": "stop",
            "turns": len(times),
            "seconds": 2.5,
            "turn_times": tuple(times) if timed else (),
        }
        return Sample(**{**values, "reward": reward, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("episodes") / "model")


@pytest.fixture
def run(tmp_path: Path, model: Model) -> FakeRun:
    return FakeRun(tmp_path / "demo", make_config(name="demo", model={"path": str(model.folder), "init": "random"}))


def store(run: FakeRun, *outcomes: Sample | str, task: str = "tools", position: int = 7) -> None:
    samples = tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
    group = Group(position=position, prompt=2, samples=samples, failures=failures)
    prepared = PreparedGroup(group=group, advantages=(0.5,) * len(samples))
    with SampleStore(run.paths.rollouts / "train", "a-0", 1 << 30) as kept:
        kept.add(records_of_group(prepared, task, "group_std"))


def dialogue(model: Model, **changes: Any) -> Sample:
    return model.sample("<|im_start|>user\n37*52<|im_end|>\n", CALL, RESULT, "1924", **changes)


def shown(run: FakeRun, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main([f"run={run.root}", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def listed(run: FakeRun) -> list[dict[str, Any]]:
    """The data of the page's list."""
    page = episodes_section(read_history(run.root))
    (data,) = re.findall(r'<script type="application/json" id="episode-data">(.*?)</script>', page, re.DOTALL)
    return list(json.loads(data))


def test_an_episode_has_its_calls_results_servers_versions_and_times(run: FakeRun, model: Model) -> None:
    store(run, dialogue(model))
    (sample,) = read_samples(run.paths).load()
    turns = turns_of(sample, SampleReader(model.folder))
    roles = [(turn.role, turn.number) for turn in turns if turn.text.strip()]
    ends = [("tool", None)]  # the template's end of the turn that called the tool
    assert roles == [
        ("user", None), ("assistant", 1), *ends, ("tool", None), ("assistant", None), ("assistant", 2)
    ]  # fmt: skip
    first, second = [turn for turn in turns if turn.sampled]
    assert first.calls == ('calculator({"expression": "37*52"})',)
    assert (first.versions, second.versions) == ((3, 4), (4, 4))
    assert dict(turn_facts(first)) == {
        "server": "node-1:8000",
        "weights": "3–4",
        "queue": "2.0 ms",
        "prefill": "10 ms",
        "decode": "100 ms",
        "tools": "30 ms",
        "request": "400 ms",
    }
    assert "tools" not in dict(turn_facts(second))
    assert "".join(turn.text for turn in turns) == SampleReader(model.folder).text(sample["tokens"])


def test_two_turns_without_input_in_between_stay_two_turns(run: FakeRun, model: Model) -> None:
    store(run, model.sample("2+2=", "4", "", "5"))
    (sample,) = read_samples(run.paths).load()
    turns = turns_of(sample, SampleReader(model.folder))
    assert [(turn.text, turn.number) for turn in turns] == [("2+2=", None), ("4", 1), ("5", 2)]
    assert [turn.times and turn.times["server"] for turn in turns] == [None, "node-1:8000", "node-3:8000"]


def test_a_branch_has_its_own_turns_and_times(run: FakeRun, model: Model) -> None:
    other = model.chat.encode("six")
    branch = Branch(
        of=0,
        shared=4,
        tokens=np.array(other, "<i4").tobytes(),
        sampled=bytes([1] * len(other)),
        logprobs=np.zeros(len(other), "<f4").tobytes(),
    )
    times = (TurnTimes(0, 4, "a:1", 0.0, 1.0), TurnTimes(1, 4, "b:1", 1.0, 1.0))
    store(run, model.sample("2+2=", "4", branches=(branch,), turn_times=times))
    (sample,) = read_samples(run.paths).load()
    sampled = [turn for turn in turns_of(sample, SampleReader(model.folder)) if turn.sampled]
    assert [(turn.row, turn.number, turn.text, dict(turn_facts(turn))["server"]) for turn in sampled] == [
        (0, 1, "4", "a:1"),
        (1, 1, "six", "b:1"),
    ]


def test_the_syntax_of_calls_is_that_of_the_samples_task() -> None:
    short = {"name": "tools", "options": {"tool_call_syntax": "short"}}
    sets = {"own": {"task": {"name": "tools"}}, "same": {"samples": 2, "temperature": 1.0}}
    config = make_config(task=short, evaluation={"sets": sets})
    assert [syntax_of(config, name) for name in (None, "held_out", "own", "same")] == [
        "short", "short", "tagged", "short"
    ]  # fmt: skip
    assert syntax_of(None) == "tagged"
    mixed = make_config(task={"name": "mix", "tasks": [{"name": "arithmetic"}, {**short, "label": "calls"}]})
    assert [syntax_of(mixed, None, label) for label in ("arithmetic", "calls", "held_out")] == [
        "tagged", "short", "tagged"
    ]  # fmt: skip


def test_the_terminal_shows_calls_and_times(run: FakeRun, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    store(run, dialogue(model))
    text = " ".join(shown(run, capsys).replace("│", " ").split())
    assert "assistant 1 · server node-1:8000 · weights 3–4 · queue 2.0 ms · prefill 10 ms · decode 100 ms" in text
    assert '→ calculator({"expression": "37*52"})' in text
    assert text.index("tools 30 ms") < text.index("<tool_response> 1924") < text.index("assistant 2 · server node-3")
    (turn, *_) = [turn for turn in json.loads(shown(run, capsys, "--json"))["conversation"] if "times" in turn]
    assert (turn["calls"], turn["times"]["server"]) == (['calculator({"expression": "37*52"})'], "node-1:8000")


def test_a_run_that_recorded_no_times_is_shown_without_them(
    run: FakeRun, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    store(run, dialogue(model, timed=False))
    store(run, dialogue(model), position=8)
    older, newer = segments(run.paths.rollouts / "train")
    parquet.write_table(parquet.read_table(older).drop_columns(["turn_times", "versions"]), older)
    text = shown(run, capsys, "--position", "7")
    assert "→ calculator" in text
    assert "queue" not in text
    assert "queue" in shown(run, capsys, "--position", "8")
    timed = [
        [turn.get("times") is not None for turn in episode["body"] if turn.get("number")] for episode in listed(run)
    ]
    assert timed == [[False, False], [True, True]]
    assert newer.exists()


@pytest.fixture
def many(run: FakeRun, model: Model) -> FakeRun:
    """Seven samples of two tasks: rewards 0 … 5 and a failure; positions count up."""
    for place in range(6):
        task = "tools" if place % 2 else "sums"
        store(
            run, model.sample("Ask ", f"Answer {place}", reward=place, seconds=float(place)), task=task, position=place
        )
    store(run, "agent failed: Connection REFUSED", position=6)
    return run


def positions(text: str) -> list[int]:
    return [json.loads(line)["position"] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text", "ANSWER 3"], [3]),
        (["--text", "ask answer", "--task", "tools"], [1, 3, 5]),
        (["--text", "refused"], [6]),
        (["--text", "nothing says this"], []),
        (["--text", "answer", "--best", "2", "--page", "2"], [3, 2]),
        (["--worst", "4", "--page", "2"], [4, 5]),
        (["--last", "3"], [4, 5, 6]),
        (["--last", "3", "--page", "3"], [0]),
        (["--slowest", "2"], [5, 4]),
        (["--longest", "1", "--page", "6"], [0]),
        (["--seconds", "2:3"], [2, 3]),
        (["--turns", "2:"], []),
    ],
    ids=str,
)
def test_a_search_reads_texts_and_pages_follow_one_another(
    many: FakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[int]
) -> None:
    assert positions(shown(many, capsys, *arguments, "--json")) == expected


def test_a_page_says_which_it_is_and_one_behind_the_last_is_an_error(
    many: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    last = shown(many, capsys, "--last", "3").splitlines()[-1]
    assert last == "3 of 7 matching samples, of 7 stored; page 1 of 3; --page 2 shows the next"
    assert shown(many, capsys, "--last", "3", "--page", "3").splitlines()[-1].endswith("; page 3 of 3")
    error = shown(many, capsys, "--last", "3", "--page", "4", code=2)
    assert "expected at most 3, the pages of 3 matching samples" in error
    assert error.count("\n") == 1
    assert "expected at most 1, the pages of" in shown(many, capsys, "--all", "--page", "2", code=2)
    assert len(positions(shown(many, capsys, "--all", "--json"))) == 7


def test_hostile_texts_reach_the_terminal_as_text(
    run: FakeRun, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    store(run, *(model.sample(text, text, reward=1.0) for text in HOSTILE), HOSTILE[3] + HOSTILE[4], task=HOSTILE[3])
    text = shown(run, capsys, "--all")
    assert {character for character in text if not character.isprintable()} == {"\n"}
    for part in ("␛]0;taken␇", "\\u009b2J", "\\u202egnp.exe\\u2066\\u200f", "\\u2028\\u2029␀␍", "</script>"):
        assert part in text
    tokens = shown(run, capsys, "--all", "--tokens")
    assert {character for character in tokens if not character.isprintable()} == {"\n"}


def test_the_middle_of_a_long_turn_is_left_out_unless_all_is_wanted(
    run: FakeRun, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a" * 30_000 + "MIDDLE" + "b" * 30_000
    store(run, model.sample("2+2=", long))
    text = shown(run, capsys)
    assert f"… {60_006 - MAX_TEXT} characters …" in text
    assert "MIDDLE" not in text
    assert len(text) < 3 * MAX_TEXT
    assert "MIDDLE" in shown(run, capsys, "--full")
    assert len(shown(run, capsys, "--text", "middle", "--json").splitlines()) == 1
    assert len(json.dumps(listed(run))) < 2 * MAX_TEXT


def test_a_text_and_a_duration_are_written_for_people() -> None:
    assert visible("ab\u202ec\x1b", None) == "ab\\u202ec␛"
    assert visible("x" * 10, 4) == "xx\n… 6 characters …\nxx"
    assert [duration(value) for value in (0.0004, 0.153, 2.314, 75.2)] == ["0.4 ms", "153 ms", "2.31 s", "75 s"]


class Tags(HTMLParser):
    """The tags of a page, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_hostile_texts_are_data_of_the_page_and_nothing_else(run: FakeRun, model: Model) -> None:
    everything = "".join(HOSTILE)
    sample = model.sample(*HOSTILE, metrics={everything: 1.0}, server=everything)
    store(run, sample, everything, task=everything)
    text = write_report(read_history(run.root)).read_text()
    page = Tags(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.handlers == []
    assert {character for character in text if not character.isprintable()} == {"\n"}
    data = json.dumps(listed(run), ensure_ascii=False)
    for part in ("\\u202egnp.exe", "␛]0;taken␇", "</script><script>", "<!--<script>"):
        assert json.dumps(part, ensure_ascii=False)[1:-1] in data


def test_a_page_holds_the_special_episodes_of_a_large_run_and_others_evenly(
    run: FakeRun, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_section, "MAX_EPISODES", 40)
    monkeypatch.setattr(episode_section, "MAX_OF_KIND", 2)
    monkeypatch.setattr("pipeline.rollout.sample_store.SEGMENT_BYTES", 20_000)
    samples = [model.sample("2+2=", "4", reward=float(place == 77), seconds=float(place == 5)) for place in range(400)]
    outcomes: list[list[Sample | str]] = [[sample] for sample in samples]
    outcomes[123] = ["agent failed"]
    with SampleStore(run.paths.rollouts / "eval", "a-0", 1 << 30) as kept:
        kept.add(records_of_evaluation(outcomes, "tools", "hard"))
    assert len(segments(run.paths.rollouts / "eval")) > 3
    stored = read_samples(run.paths)
    picked = chosen(stored)
    places = picked.column("position")
    assert places == sorted(places)
    assert {5, 77, 123} <= set(places)
    assert 30 <= len(picked) <= 40
    gaps = np.diff([0, *places, 399])
    assert gaps.max() <= 40, "no part of the run is left out"
    assert stored.spread(5, 1).column("position")[-1] == 399, "of one file, the last"
    assert stored.spread(0, 9).column("position") == []
    assert len(stored.where(Filter(failed=True)).within([])) == 0


def test_a_page_has_a_bounded_size(run: FakeRun, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_section, "MAX_BYTES", 30_000)
    store(run, *(model.sample("2+2=", "x" * 9000, "", "y" * 9000) for _ in range(20)))
    assert len(listed(run)) == 4
    assert "4 episodes of 20 stored" in episodes_section(read_history(run.root))


def test_a_reward_that_is_no_number_does_not_cost_the_page(run: FakeRun, model: Model) -> None:
    store(run, model.sample("2+2=", "4", reward=float("nan")))
    assert [episode["reward"] for episode in listed(run)] == [None]


def test_a_reader_searches_filters_and_turns_pages_in_a_browser(run: FakeRun, model: Model) -> None:
    everything = "".join(HOSTILE)
    for place in range(45):
        store(run, model.sample("Ask ", f"Answer {place}", reward=place / 10), position=place)
    store(run, dialogue(model), model.sample(everything, everything), everything, position=99, task=everything)
    file = write_report(read_history(run.root))

    async def read() -> None:
        async with open_page(file) as page:
            count, cards = "document.getElementById('episode-count').textContent", ".episode"
            assert await page.run(count) == "48 of 48 episodes, page 1 of 3"
            assert await page.run(f"document.querySelectorAll('{cards}').length") == 20
            await page.run("document.getElementById('episode-next').click(); 0")
            assert await page.run(count) == "48 of 48 episodes, page 2 of 3"
            await page.type("text", "ANSWER 4")
            assert await page.run(count) == "6 of 48 episodes, page 1 of 1"
            await page.type("reward_min", "4.15")
            await page.type("order", "best")
            assert await page.run(count) == "3 of 48 episodes, page 1 of 1"
            first = "document.querySelector('.episode summary').textContent"
            assert "position 44" in await page.run(first)
            assert await page.run("location.hash") == "#episodes?text=ANSWER+4&reward_min=4.15&order=best"
            await page.run("document.getElementById('episode-clear').click(); 0")
            await page.type("outcome", "failed")
            assert await page.run(count) == "1 of 48 episodes, page 1 of 1"
            assert page.problems == []
        async with open_page(file, "#episodes?turns_min=2&open=1") as page:
            text = await page.run("document.getElementById('episode-list').innerText")
            for part in ("server node-1:8000", "decode 100 ms", '→ calculator({"expression": "37*52"})', "assistant 2"):
                assert part in text
            assert await page.run("document.querySelectorAll('.track .bar.decode').length") == 2
        async with open_page(file, "#episodes?text=taken&open=1") as page:
            assert await page.run("document.title") == "demo · Rollcall", "no text of a sample ran"
            assert await page.run("document.querySelectorAll('#episodes img, #episodes script').length") == 2
            text = await page.run("document.getElementById('episode-list').innerText")
            for part in (
                "</script><script>document.title='taken'",
                "<img src=x onerror=",
                "\\u202egnp.exe",
                "␛]0;taken␇",
            ):
                assert part in text
            assert page.problems == []

    asyncio.run(asyncio.wait_for(read(), 240))
