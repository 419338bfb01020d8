"""`pipeline.observability`: a page for every run directory, however little is in it."""

import json
import os
import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from pipeline.errors import ConfigError
from pipeline.observability import run_history as histories
from pipeline.observability import trace_command
from pipeline.observability.chart_subjects import all_charts, measures_accuracy, unmeasured
from pipeline.observability.metric_charts import Chart, resume_steps, smoothed
from pipeline.observability.report_page import page, state, tiles, wall_seconds, write_report
from pipeline.observability.run_history import find_run, read_history
from pipeline.observability.timeline import MAX_ROLES, bars, shown_roles, timeline, warm_ups
from pipeline.roles.role_context import Status
from pipeline.run.metrics_log import FileStep, MetricSinks
from pipeline.run.run_documents import RunIdentity
from pipeline.utils import shared_files
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun
from tests.support.strangers import NOBODY, needs_another_user, shared_directory

TRAINING = {"steps": 60, "prompts_per_step": 4, "max_lag": 2, "sft": {"steps": 20}}


class Links(HTMLParser):
    """Collects every address in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]


def test_the_headline_gives_state_steps_wall_time_accuracy_and_lag(finished: FakeRun) -> None:
    history = read_history(finished.root)
    words = {what: value for value, what in tiles(history)}
    assert state(history) == "finished"
    assert words["steps of RL"] == "60 / 60"
    assert words["held-out accuracy, +37.9 points"] == "20.0% → 57.9%"
    assert words["largest lag, at most 2 allowed"] == "2"
    assert wall_seconds(history) < 120, "the hour between the attempts does not count"


def test_the_page_of_sft_alone_tells_of_its_steps_and_its_loss(tmp_path: Path) -> None:
    training = {"steps": 0, "prompts_per_step": 4, "sft": {"steps": 20}}
    run = FakeRun(tmp_path / "sft", make_config(name="sft", training=training))
    attempt = run.attempt("local1-0")
    attempt.train("sft", range(1, 21))
    run.finish(20)
    history = read_history(run.root)
    words = {what: value for value, what in tiles(history)}
    assert words["steps of SFT"] == "20 / 20"
    assert re.fullmatch(r"2\.\d+ → 2\.\d+", words["loss, first → last tenth"])
    assert [chart.title for chart in all_charts(history)] == ["Loss of SFT", "Throughput"]
    assert "of RL" not in page(history)


def test_the_page_of_sft_names_its_data_and_its_loss_is_in_nats(tmp_path: Path) -> None:
    training = {"steps": 0, "prompts_per_step": 4, "sft": {"steps": 20}, "eval_every": 10}
    run = FakeRun(tmp_path / "sft", make_config(name="sft", training=training, data={"path": "/data/chats.jsonl"}))
    attempt = run.attempt("local1-0")
    attempt.train("sft", range(1, 21), grad_norm=2.5)
    with MetricSinks(run.paths.metrics, attempt.paths.attempt) as sinks:
        for step in (10, 20):
            sinks.log("eval", "sft", step, {"eval/loss": 1.437 + 1 / step})
    history = read_history(run.root)
    text = page(history)
    assert "SFT · /data/chats.jsonl · " in text
    assert "arithmetic · " not in text
    loss, gradient, _ = all_charts(history)
    assert (loss.title, gradient.title) == ("Loss of SFT", "Gradient norm of SFT")
    assert ">1.49<" in loss.svg
    assert "%<" not in loss.svg, "a loss is no share"


def charts_of(run: FakeRun) -> dict[str, Chart]:
    return {chart.title: chart for chart in all_charts(read_history(run.root))}


REWARDED = {"functions": ["mine:exact", "mine:short"], "weights": [1, 0.5]}


def test_a_weighted_reward_is_no_accuracy_and_each_function_has_a_curve(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "r", make_config(name="r", training=TRAINING, reward=REWARDED))
    attempt = run.attempt("local1-0")
    numbers = {"rewards/exact": 0.7, "rewards/short": 0.4, "rewards/short/characters": 31.0}
    attempt.train("rl", range(31), eval_every=10, **numbers)
    history, charts = read_history(run.root), charts_of(run)
    assert "Held-out accuracy" not in charts
    assert "%<" not in charts["Held-out reward"].svg
    assert charts["Reward functions"].note == "Mean score of each, before its weight (exact 1, short 0.5)."
    for name in ("exact", "short"):
        assert f">{name}<" in charts["Reward functions"].svg
    assert "characters" not in charts["Reward functions"].svg
    words = {what: value for value, what in tiles(history)}
    assert words["held-out reward, +0.236"] == "0.2 → 0.436"
    assert "accuracy" not in page(history)


@pytest.mark.parametrize(("value", "accuracy"), [(0.46, True), (1.5, False), (-0.1, False)])
def test_a_reward_that_leaves_the_range_of_a_share_is_shown_as_a_number(
    value: float, accuracy: bool, run: FakeRun
) -> None:
    rows = [{"kind": "eval", "job": "rl", "step": 0, "eval/accuracy": value}]
    assert measures_accuracy(run.config, rows) == accuracy


def test_an_evaluation_set_with_rewards_of_its_own_is_judged_by_those() -> None:
    sets = {"same": {}, "own": {"task": {"name": "arithmetic"}, "reward": REWARDED}}
    config = make_config(training=TRAINING, evaluation={"sets": sets})
    assert [measures_accuracy(config, [], name) for name in ("", "same", "own")] == [True, True, False]
    weighted = make_config(training=TRAINING, reward=REWARDED, evaluation={"sets": {"same": {}}})
    assert not measures_accuracy(weighted, [], "same")


def test_what_an_optimizer_does_and_what_samples_are_like_is_drawn_where_it_was_measured(run: FakeRun) -> None:
    attempt = run.attempt("local1-0")
    attempt.train("rl", range(1, 31))
    plain = charts_of(run)
    measured = {
        "grad_norm": 0.8,
        "reference_kl": 0.01,
        "mismatch_kl": 0.002,
        "clip_fraction": 0.02,
        "entropy": 1.3,
        "completion_length/mean": 120.0,
        "completion_length/max": 512.0,
        "groups/zero_variance": 0.4,
        "samples/truncated": 0.1,
        "concurrency/in_flight": 7.0,
        "concurrency/limit": 8.0,
    }
    drawn = {
        "Gradient norm",
        "KL",
        "Clip fraction",
        "Entropy",
        "Completion length",
        "Groups and samples with little to learn from",
        "Groups in flight",
    }
    assert not drawn & plain.keys()
    assert unmeasured(read_history(run.root)) == [
        "entropy: training.metrics=with_entropy",
        "KL to a reference model: loss.kl above 0",
    ]
    attempt.train("rl", range(31, 61), **measured)
    charts = charts_of(run)
    assert drawn <= charts.keys()
    assert {"Loss", "Reward", "Lag"} <= charts.keys()
    for name in ("to the reference", "trainer ∥ sampler"):
        assert f">{name}<" in charts["KL"].svg
    assert "longest from 512 to 512" in charts["Completion length"].svg
    assert "limit from 8 to 8" in charts["Groups in flight"].svg
    assert "%<" in charts["Groups and samples with little to learn from"].svg
    assert unmeasured(read_history(run.root)) == []
    sections = [chart.section for chart in all_charts(read_history(run.root))]
    assert list(dict.fromkeys(sections)) == ["Learning", "Optimization", "Speed"]
    assert sections == sorted(sections, key=["Learning", "Optimization", "Speed"].index)


def test_the_page_of_jobs_of_files_tells_of_each_kind(tmp_path: Path) -> None:
    training = {"steps": 0, "prompts_per_step": 4, "jobs": "/data/queue"}
    run = FakeRun(tmp_path / "jobs", make_config(name="jobs", training=training))
    nothing = read_history(run.root)
    assert [(chart.title, chart.missing) for chart in all_charts(nothing)] == [
        ("Loss", "metrics.jsonl has no loss yet")
    ]
    assert tiles(nothing)[0] == ("0", "steps of all jobs")
    attempt = run.attempt("local1-0")
    with MetricSinks(run.paths.metrics, attempt.paths.attempt) as sinks:
        for step in range(1, 9):
            kind = "sft" if step <= 4 else "rl"
            numbers = {"loss": 1.0 / step, "tokens_per_second": 10.0 * step}
            sinks.log("train", kind, step, numbers, FileStep(kind, 1, (step - 1) % 4 + 1, 4))
    history = read_history(run.root)
    assert [chart.title for chart in all_charts(history)] == [
        "Loss of SFT", "Throughput", "Loss of RL", "Throughput"
    ]  # fmt: skip
    assert {"steps of all jobs": "8", "tokens/s trained, median": "50"}.items() <= {
        what: value for value, what in tiles(history)
    }.items()
    assert "/data/queue" in page(history)


def test_a_page_is_self_contained(finished: FakeRun) -> None:
    for log in ("trainer.0", "actor.0"):
        (finished.root / "attempts/local1-0/logs").mkdir(exist_ok=True)
        (finished.root / f"attempts/local1-0/logs/{log}.log").write_text("x")
    text = page(read_history(finished.root))
    outside = [link for link in Links(text).found if not link.startswith("#") and not (finished.root / link).exists()]
    assert outside == []
    assert "attempts/local1-0/logs/actor.0.log" in text
    assert not re.search(r"url\((?!#)|@import|<script", text)


def test_a_run_that_wandb_keeps_offline_says_how_it_is_sent(run: FakeRun) -> None:
    assert "wandb sync" not in page(read_history(run.root))
    (run.paths.tracking / "wandb" / "offline-run-20260101_000000-demo").mkdir(parents=True)
    assert f"<code>wandb sync {run.paths.tracking}/wandb/offline-run-*</code>" in page(read_history(run.root))


def test_charts_take_their_colours_from_the_page(finished: FakeRun) -> None:
    for chart in all_charts(read_history(finished.root)):
        ElementTree.fromstring(chart.svg)
        assert "#1010" not in chart.svg, "a mark was not replaced"
        assert "var(--series-1)" in chart.svg
        assert f'aria-label="{chart.title}' in chart.svg


def test_every_subject_has_a_chart(finished: FakeRun) -> None:
    titles = [chart.title for chart in all_charts(read_history(finished.root))]
    assert titles == ["Reward", "Held-out accuracy", "Loss", "Lag", "Throughput", "Idle", "Weight sync", "Loss"]


def test_a_resume_is_marked_at_the_first_step_of_the_new_attempt(finished: FakeRun) -> None:
    assert resume_steps(read_history(finished.root).rows) == [31]


def test_equal_runs_give_equal_charts(finished: FakeRun) -> None:
    history = read_history(finished.root)
    assert all_charts(history) == all_charts(history)


def test_the_goodput_has_a_row_for_the_start_and_for_each_outage(finished: FakeRun) -> None:
    text = page(read_history(finished.root))
    section = text[text.index("<h2>Goodput</h2>") : text.index("<h2>Roles</h2>")]
    assert "<td>start</td>" in section
    assert "<td>draining: SIGTERM (agent.0)</td>" in section
    assert "<th>requeue</th>" in section
    assert "<th>detection</th>" not in section, "no outage has this cause"
    assert '<table class="outages">' in section, "its first column wraps, so that all columns fit the page"


def test_a_run_directory_with_nothing_in_it_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = page(read_history(tmp_path))
    for missing in ("config.json is missing", "no attempt has started", "no reward/mean", "nothing was written"):
        assert missing in text
    assert "not submitted" in text


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "config.json",
        "finished.json",
        "metrics.jsonl",
        "attempts/local2-0/timeline/rank-0.jsonl",
        "attempts/local2-0/events/1.json",
        "attempts/local2-0/status/actor.0.json",
    ],
)
@pytest.mark.parametrize("damage", ["absent", "empty", "torn", "nonsense"])
def test_no_missing_or_torn_file_stops_the_report(finished: FakeRun, name: str, damage: str) -> None:
    file = finished.root / name
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "torn": data[: len(data) // 2], "nonsense": b"\xff\x00{"}[damage])
    # Drawing is not what is tested here: the same history feeds it.
    history = read_history(finished.root)
    assert tiles(history)
    assert state(history) in ("finished", "interrupted")


ODD_FIELDS = (
    {"time": None},
    {"step": "61"},
    {"reward/mean": "0.5"},
    {"loss": [1]},
    {"tokens_per_second": "fast"},
    {"reward/mean": 1.7e308, "loss": -1.7e308},
    {"seconds/step": "long", "start/restore_seconds": {}},
)


def test_odd_rows_of_metrics_stop_neither_report_nor_trace(finished: FakeRun, tmp_path: Path) -> None:
    row = {"kind": "train", "job": "rl", "step": 61, "time": 1767225600.0, "attempt": "local2-0"}
    with finished.paths.metrics.open("a") as file:
        file.writelines(f"{json.dumps(row | fields)}\n" for fields in ODD_FIELDS for _ in range(2))
    assert "<h3>Reward</h3>" in page(read_history(finished.root))
    assert trace_command.main([f"run={finished.root}", f"trace={tmp_path}/out.json"]) == 0


def test_a_failure_stands_at_the_top_with_its_last_lines_and_what_to_do(run: FakeRun) -> None:
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    attempt.fail("actor.0", 0)
    text = page(read_history(run.root))
    assert text.index("actor.0 failed first") < text.index("Reward")
    for word in ("killed by SIGKILL", "exit code -9", "rank 0", "group 812 sent", "What to do:"):
        assert word in text
    assert state(read_history(run.root)) == "failed"


def test_text_from_the_run_cannot_break_the_page(run: FakeRun) -> None:
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting")
    failure = attempt.fail("actor.0", 0)
    hostile = msgspec.structs.replace(failure, cause="<script>x</script>")
    shared_files.write_document(attempt.paths.first_failure, hostile)
    text = page(read_history(run.root))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_names_in_a_chart_are_neither_markup_nor_formulas(run: FakeRun) -> None:
    names = ['a"><img src=x onerror=alert(1)>', r"price_$\frac$", "in_$x$_out"]
    attempt = run.attempt("local1-0")
    attempt.role("<b>$\\frac$", 0, "starting")
    attempt.role("<b>$\\frac$", 0, "ready")
    attempt.train("rl", range(1, 5), **{f"rewards/{name}": 0.5 for name in names})
    with MetricSinks(run.paths.metrics, attempt.paths.attempt) as sinks:
        sinks.log("eval", "rl", 4, {f"eval/{names[0]}/accuracy": 0.5}, eval_set=names[0])
    text = page(read_history(run.root))
    assert "<img" not in text
    assert "<b>$" not in text
    for name in names:
        assert f">{escape(name, quote=False)}</text>" in text
    assert f'aria-label="Reward functions: {escape(names[0])} from' in text


def test_odd_times_and_names_of_files_stop_neither_report_nor_trace(run: FakeRun, tmp_path: Path) -> None:
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "ready")
    roles = {role: transition.time for role, transition in histories.read_attempt(attempt.paths).states.items()}
    for time in (1.7e308, -1.7e308):
        run.now = time
        attempt.role("actor.0", 0, "stopping")
        attempt.tell("draining", "agent.0")
    identity = shared_files.read_document(run.paths.run, RunIdentity)
    shared_files.write_document(run.paths.run, msgspec.structs.replace(identity, created=1e300))
    attempt.paths.logs.mkdir(exist_ok=True)
    for name in ("\udcff.log", "a b?.log"):
        (attempt.paths.logs / name).touch()
    (run.paths.attempts / "\udcff-0").mkdir()
    history = read_history(run.root)
    assert {role: transition.time for role, transition in history.attempts[-1].states.items()} == roles
    text = write_report(history).read_text()
    links = Links(text).found
    assert {"attempts/local1-0/logs/%FF.log", "attempts/local1-0/logs/a%20b%3F.log"} <= {*links}
    assert trace_command.main([f"run={run.root}", f"trace={tmp_path}/out.json"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_bars_last_from_one_state_to_the_next_and_the_open_one_to_the_end(run: FakeRun) -> None:
    attempt = run.attempt("local1-0")
    for second, reached in ((0, "starting"), (5, "ready")):
        run.now += second
        attempt.role("actor.0", 0, reached)  # type: ignore[arg-type]
    transitions = histories.read_attempt(attempt.paths).transitions
    began = transitions[0].time
    assert bars(transitions, began, began + 12) == [(0.0, 5.0, "starting"), (5.0, 7.0, "ready")]


def test_a_warm_up_is_shown_where_a_role_told_of_one(run: FakeRun) -> None:
    numbers = {"warm_up/began": run.now + 4, "warm_up/ended": run.now + 24}
    told = Status(state="ready", pid=1, time=run.now + 30, numbers=numbers)
    assert warm_ups(told, run.now) == [(4.0, 20.0)]
    assert warm_ups(Status(state="ready", pid=1, time=run.now), run.now) == warm_ups(None, run.now) == []


def test_a_timeline_of_many_roles_keeps_those_that_failed(run: FakeRun) -> None:
    attempt = run.attempt("local1-0")
    for number in range(3 * MAX_ROLES):
        run.now += 1
        attempt.role(f"inference.{number}", number, "starting")
    attempt.role(f"inference.{3 * MAX_ROLES - 1}", 3 * MAX_ROLES - 1, "failed")
    read = histories.read_attempt(attempt.paths)
    shown = shown_roles(read)
    assert len(shown) == MAX_ROLES
    assert f"inference.{3 * MAX_ROLES - 1}" in shown
    assert f"{2 * MAX_ROLES} more roles are not shown" in timeline(read).note


def test_smoothing_keeps_length_steps_and_a_constant() -> None:
    assert smoothed([(1, 2.0), (2, 2.0), (3, 2.0)], 5) == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert smoothed([(1, 0.0), (2, 3.0), (3, 0.0)], 1) == [(1, 0.0), (2, 1.0), (3, 0.0)]


def test_a_run_is_found_by_directory_and_by_name(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run([f"run={run.root}"]) == run.root.resolve()
    monkeypatch.setattr(histories, "RUNS", run.root.parent)
    assert find_run(["run=demo"]) == run.root.resolve()
    with pytest.raises(ConfigError, match=r"run='dmeo': expected a run directory.*found there: demo"):
        find_run(["run=dmeo"])


def test_the_command_writes_the_report_and_refuses_what_is_no_run(run: FakeRun) -> None:
    command = [sys.executable, "-P", "-m", "pipeline.observability"]
    done = subprocess.run([*command, f"run={run.root}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(run.paths.report)
    assert run.paths.report.read_text().startswith("<!doctype html>")
    refused = subprocess.run([*command, "run=/nowhere"], capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_report_is_written_again_over_the_old_one(run: FakeRun) -> None:
    assert write_report(read_history(run.root)) == write_report(read_history(run.root))


@needs_another_user
def test_a_run_of_another_user_is_said_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_directory() as output:
        (output / "demo").mkdir(mode=0o700)
        monkeypatch.chdir(output)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(ConfigError, match=r"a run directory that you may read.*readable_by=group"):
                find_run([f"run={output / 'demo'}"])
        finally:
            os.seteuid(0)
