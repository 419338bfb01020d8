"""The report as one HTML page: its layout and its text.

The page opens from a file, offline. Every run directory gives a page; a note replaces each missing part.
"""

import os
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from pipeline.checkpoints import root_of
from pipeline.config import RunConfig, TrainingConfig
from pipeline.config.run_identity import flatten
from pipeline.errors import one_line
from pipeline.observability.attempts_table import attempt_table
from pipeline.observability.chart_subjects import all_charts, measures_accuracy, unmeasured
from pipeline.observability.episode_section import CONTENT_POLICY, episodes_section
from pipeline.observability.findings import findings_of
from pipeline.observability.goodput_section import goodput_table, outages_chart, summary
from pipeline.observability.metric_charts import Chart
from pipeline.observability.number_format import clock, moment, number, plural
from pipeline.observability.report_style import STYLE
from pipeline.observability.run_history import Attempt, History
from pipeline.observability.run_status import State, current_state, reason_of, state_of
from pipeline.observability.sample_gallery import gallery
from pipeline.observability.timeline import timeline
from pipeline.run.first_failure import FirstFailure
from pipeline.run.goodput_records import read_goodput
from pipeline.run.metrics_log import MetricRecord, series
from pipeline.tracking.tracker_protocol import upload_commands
from pipeline.utils import shared_files

Tile = tuple[str, str]


def write_report(history: History) -> Path:
    """Write `report.html` into the run directory and return its path."""
    # Names of files may have bytes that are not UTF-8.
    shared_files.write_atomic(history.paths.report, page(history).encode(errors="replace"))
    return history.paths.report


def page(history: History) -> str:
    """The page's HTML."""
    parts = (
        _head(history),
        _tiles(tiles(history)),
        _failure(history),
        _findings(history),
        _numbers(history),
        _samples(history),
        _goodput(history),
        _timelines(history),
        _config(history),
        _files(history),
    )
    title = escape(history.name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} · Rollcall</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def newest_attempt(history: History) -> Attempt | None:
    """The last attempt of the last submitted job; None before its first."""
    return current_state(history.attempts[-1] if history.attempts else None, history.job)


def state(history: History) -> State:
    """The run's state when its files were read."""
    finished = history.finished is not None
    return state_of(newest_attempt(history), history.job, history.rows, finished=finished, alive=history.alive)


def tiles(history: History) -> list[Tile]:
    """The headline numbers, as pairs of a value and its label."""
    config, rows = history.config, history.rows
    if config and config.evaluation.only:
        return [_wall_tile(history), *_set_tiles(config, rows)]
    steps, rewards = series(rows, "reward/mean"), [value for _, value in series(rows, "reward/mean")]
    speeds = _speeds(row for row in rows if row["job"] == "rl")
    if config and not config.has_rl:
        return _trainer_tiles(history, config.training)
    total = f" / {config.training.steps}" if config else ""
    limit = f", at most {config.training.max_lag} allowed" if config else ""
    return [
        (f"{steps[-1][0] if steps else 0}{total}", "steps of RL"),
        _wall_tile(history),
        _held_out_tile([value for _, value in series(rows, "eval/accuracy")], measures_accuracy(config, rows)),
        _first_last(rewards, "mean reward, first → last tenth"),
        (
            number(max((value for _, value in series(rows, "staleness/max")), default=None), ".0f"),
            f"largest lag{limit}",
        ),
        _speed_tile(speeds),
    ]


def _set_tiles(config: RunConfig, rows: Sequence[MetricRecord]) -> list[Tile]:
    """The tiles of a run that only evaluates: the result of each set."""
    results = [(row.get("set", ""), row) for row in rows if row["kind"] == "eval"]
    tiles = []
    for name, row in results:
        prefix = f"eval/{name}/" if name else "eval/"
        value, error = row.get(f"{prefix}accuracy"), row.get(f"{prefix}stderr")
        what, form = ("accuracy", ".1%") if measures_accuracy(config, rows, name) else ("reward", ".3g")
        bounds = "" if error is None else f" ± {error:{form}}"
        tiles.append((f"{number(value, form)}{bounds}", f"{what} on {name or 'the held-out prompts'}"))
    return tiles


def _trainer_tiles(history: History, training: TrainingConfig) -> list[Tile]:
    """The tiles of a run that consists of a trainer: SFT, or the jobs of files."""
    rows = [row for row in history.rows if row["kind"] == "train"]
    done = str(rows[-1]["step"] if rows else 0)
    if training.jobs:
        return [(done, "steps of all jobs"), _wall_tile(history), _speed_tile(_speeds(rows))]
    job, name = ("preference", "preferences") if any(row["job"] == "preference" for row in rows) else ("sft", "SFT")
    total = training.sft.steps or max((int(steps) for _, steps in series(rows, "steps", job=job)), default=0)
    best = min(series(history.rows, "eval/loss", job=job), key=lambda point: point[1], default=None)
    return [
        (f"{done} / {total or '?'}", f"steps of {name}"),
        _wall_tile(history),
        _first_last([value for _, value in series(rows, "loss", job=job)], "loss, first → last tenth"),
        *([(number(best[1], ".3f"), f"lowest held-out loss, at step {best[0]}")] if best else []),
        _speed_tile(_speeds(rows)),
    ]


def _speeds(rows: Iterable[MetricRecord]) -> list[float]:
    """The tokens per second of each step, in ascending order."""
    return sorted(row["tokens_per_second"] for row in rows if row.get("tokens_per_second") is not None)


def _wall_tile(history: History) -> Tile:
    return clock(wall_seconds(history)), f"wall time, {plural(len(history.attempts), 'attempt')}"


def _speed_tile(speeds: Sequence[float]) -> Tile:
    return number(speeds[len(speeds) // 2] if speeds else None, ",.0f"), "tokens/s trained, median"


def wall_seconds(history: History) -> float:
    """The total run time of all attempts, without the gaps between them."""
    return sum(
        attempt.transitions[-1].time - attempt.transitions[0].time
        for attempt in history.attempts
        if attempt.transitions
    )


def _held_out_tile(scores: list[float], accuracy: bool) -> Tile:
    what, form = ("held-out accuracy", ".1%") if accuracy else ("held-out reward", ".3g")
    if len(scores) < 2:
        return number(scores[0] if scores else None, form), what
    change = scores[-1] - scores[0]
    by = f"{100 * change:+.1f} points" if accuracy else f"{change:+.3g}"
    return f"{scores[0]:{form}} → {scores[-1]:{form}}", f"{what}, {by}"


def _first_last(values: list[float], what: str) -> Tile:
    if not values:
        return "—", what
    tenth = max(1, len(values) // 10)
    return f"{sum(values[:tenth]) / tenth:.2f} → {sum(values[-tenth:]) / tenth:.2f}", what


def _head(history: History) -> str:
    word = state(history)
    identity, config = history.identity, history.config
    facts = ["config.json is missing or unreadable"]
    if config:
        facts = [*_what_it_does(config), config.model.path]
    if identity:
        facts.append(moment(identity.created, "%Y-%m-%d %H:%M UTC"))
        facts += [f"revision {identity.revision}"] if identity.revision else []
    return (
        f'<div class="head"><h1>{escape(history.name)}</h1>'
        f'<span class="state {word.replace(" ", "-")}">{word}</span></div>'
        f'<p class="quiet">{escape(" · ".join(facts))}</p>'
    )


def _what_it_does(config: RunConfig) -> list[str]:
    """The run's purpose: task and loss, or the data of SFT, where the task's name has no effect."""
    if config.training.jobs:
        return ["jobs", config.training.jobs]
    if config.evaluation.only:
        return ["evaluation", config.task.name] if config.evaluation.builtin_set else ["evaluation"]
    if config.replay:
        return ["replay", config.replay, config.loss.name]
    if not config.has_rollouts:
        if config.has_preference:
            return ["preferences", config.data.path, config.preference.loss]
        return ["SFT", config.data.path or f"demonstrations of {config.task.name}"]
    return [config.task.name, config.loss.name]


def _tiles(values: Iterable[Tile]) -> str:
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in values
    )
    return f'<div class="tiles">{cells}</div>'


def _failure(history: History) -> str:
    """The reason why the run failed or is failing. Empty for a requeued job: the list of attempts has its reasons."""
    last = newest_attempt(history)
    if last is None or state(history) in ("queued", "left"):
        return ""
    if last.failure:
        return _first_failure(last.failure)
    reason = reason_of(last)
    return f'<section class="failure"><h2>The job stopped</h2><p>{escape(reason)}</p></section>' if reason else ""


def _findings(history: History) -> str:
    """The tuning hints; empty if there are none."""
    findings = findings_of(history.config, history.rows)
    lines = "".join(
        f"<li>{escape(finding.observation)} <b>{escape(finding.change)}</b> <span>{escape(finding.page)}</span></li>"
        for finding in findings
    )
    return f'<section class="findings"><h2>What to change</h2><ul>{lines}</ul></section>' if findings else ""


def _first_failure(failure: FirstFailure) -> str:
    code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    when = moment(failure.time, "%Y-%m-%d %H:%M:%S UTC")
    lines = escape("\n".join(failure.last_lines)) or "its log is empty"
    return (
        f'<section class="failure"><h2>{escape(failure.role)} failed first</h2>'
        f"<p>{escape(failure.cause)}{code}, on rank {failure.rank}, {when}</p>"
        f"<p><b>What to do:</b> {escape(failure.hint)}</p><pre>{lines}</pre></section>"
    )


def _numbers(history: History) -> str:
    """The charts by section, and a note with the metrics that the run did not measure."""
    parts = []
    for section, charts in groupby(all_charts(history), key=lambda chart: chart.section):
        parts.append(f'<h2>{escape(section)}</h2><div class="charts">{"".join(map(_figure, charts))}</div>')
    if missing := unmeasured(history):
        parts.append(f'<p class="note">Not measured in this run: {escape("; ".join(missing))}.</p>')
    return "".join(parts)


def _figure(chart: Chart, kind: str = "") -> str:
    body = chart.svg or f'<div class="missing">{escape(chart.missing)}</div>'
    words = f"<h3>{escape(chart.title)}</h3><figcaption>{escape(chart.note)}</figcaption>"
    return f'<figure class="{kind}">{words}{body}</figure>'


def _samples(history: History) -> str:
    """The samples; empty for a run without stored samples."""
    try:
        charts, phases = gallery(history)
        episodes = episodes_section(history)
    except Exception as error:  # noqa: BLE001 - the rest of the page does not need it
        return f'<h2>Samples</h2><div class="missing">they cannot be read: {escape(one_line(error))}</div>'
    if not phases:
        return ""
    drawn = "".join(_figure(chart) for chart in charts)
    return f'<h2>Samples</h2><div class="charts">{drawn}</div>{phases}{episodes}'


def _timelines(history: History) -> str:
    drawn = "".join(_figure(timeline(attempt), "wide") for attempt in history.attempts)
    missing = '<div class="missing">no attempt has started a role yet</div>'
    table = attempt_table(history)
    attempts = f"<h2>Attempts</h2>{table}" if table else ""
    return f"{attempts}<h2>Roles</h2>{drawn or missing}"


def _goodput(history: History) -> str:
    """The goodput with a bar and a row for each outage; empty for a run that trains no steps itself."""
    config = history.config
    if config is None or config.training.jobs or config.serve.enabled or config.evaluation.only:
        return ""
    measured = read_goodput(history.paths.root)
    if measured is None or not measured.useful:
        return ""
    words = f'<p class="note">{escape(summary(measured))}. Causes: docs/goodput.md.</p>'
    return f"<h2>Goodput</h2>{words}{_figure(outages_chart(measured), 'wide')}{goodput_table(measured)}"


def _config(history: History) -> str:
    if history.config is None:
        return '<h2>Configuration</h2><div class="missing">config.json is missing or unreadable</div>'
    groups: dict[str, list[tuple[str, object]]] = {}
    for key, value in flatten(history.config.model_dump(mode="json")).items():
        section, dot, name = key.rpartition(".")
        groups.setdefault(section if dot else "run", []).append((name, value))
    tables = "".join(_table(section, values) for section, values in groups.items())
    return f'<h2>Configuration</h2><div class="columns">{tables}</div>'


def _table(title: str, values: Iterable[tuple[str, object]]) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="value">{escape(str(value))}</td></tr>' for name, value in values
    )
    return f'<table><tr><th colspan="2">{escape(title)}</th></tr>{rows}</table>'


def _files(history: History) -> str:
    run = history.paths
    named = [run.metrics, run.ledger, run.config, run.checkpoints, run.model]
    links = [_link(file, run.root) for file in named if file.exists()]
    if history.config and history.identity and history.config.training.checkpoints:
        links.append(f"checkpoints in {escape(root_of(history.config, run, history.identity.run_id))}")
    logs = [_logs(attempt, run.root) for attempt in history.attempts]
    footer = f"<footer>Written {moment(time.time(), '%Y-%m-%d %H:%M UTC')} by Rollcall.</footer>"
    uploads = (f'<p class="note">To upload it: <code>{escape(command)}</code></p>' for command in upload_commands(run))
    files = f"<h2>Files</h2><p>{' · '.join(links) or 'nothing was written yet'}</p>"
    return "".join((files, *logs, *uploads, footer))


def _logs(attempt: Attempt, root: Path) -> str:
    logs = sorted(attempt.paths.logs.glob("*.log"))
    links = " · ".join(_link(log, root, log.stem) for log in logs) or "none"
    return f'<p class="note">Logs of {escape(attempt.name)}: {links}</p>'


def _link(file: Path, root: Path, text: str = "") -> str:
    target = file.relative_to(root).as_posix()
    return f'<a href="{quote(os.fsencode(target))}">{escape(text or target)}</a>'
