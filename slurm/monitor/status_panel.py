"""Rendering of a snapshot in a terminal, as one panel.

Owns layout, colors, texts and rounding. Pure: a snapshot in, a renderable out; reads no file and no clock.
"""

from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.observability.number_format import clock, moment, number
from pipeline.run.events import Event
from pipeline.run.notices import Notice
from pipeline.utils.user_commands import user_command
from slurm.monitor.run_snapshot import EvaluationProgress, JobLine, Progress, RoleLine, Snapshot

MAX_ROLES = 16
MAX_PAST = 5
MAX_NOTICES = 5
_BARS = "▁▂▃▄▅▆▇█"
COLORS = {
    "not submitted": "bright_black",
    "waiting": "bright_black",
    "queued": "cyan",
    "left": "cyan",
    "meeting": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "ready": "green",
    "training": "green",
    "evaluating": "green",
    "finishing": "cyan",
    "stopping": "yellow",
    "stopped": "bright_black",
    "interrupted": "yellow",
    "failed": "bold red",
    "finished": "bold green",
}
"""The color of each state of a run, a role and an attempt; only working states are green."""
UNSURE = "yellow"
"""The color of states that need attention."""


def render_run(snapshot: Snapshot) -> RenderableType:
    """The whole state of a run in one panel."""
    parts: list[RenderableType] = [
        _roles_table(snapshot),
        *_missing_servers(snapshot),
        Text(),
        _progress_line(snapshot),
        *_evaluation_line(snapshot),
        Text(),
        _figures(snapshot),
    ]
    if snapshot.silent:
        parts += [Text(), Text(silence_text(snapshot), UNSURE)]
    if snapshot.job and snapshot.job.trouble:
        parts += [Text(), Text(no_answer(snapshot.job), UNSURE)]
    if snapshot.past:
        parts += [Text(), _past_table(snapshot)]
    events = [event for event in snapshot.events if event.name != "failed" or snapshot.failure is None]
    if events or snapshot.notices:
        parts += [Text(), _events(events, snapshot.notices)]
    if snapshot.reason and snapshot.state not in ("queued", "left", "finished"):
        parts += [Text(), Text(snapshot.reason, style="red")]
    color = UNSURE if snapshot.silent else COLORS[snapshot.state]
    title = Text.assemble((f" {snapshot.name} ", "bold"), (f"{state_text(snapshot)} ", color))
    elapsed = f"· {clock(snapshot.until - snapshot.began)} " if snapshot.began else ""
    subtitle = Text(f" {attempt_text(snapshot)} {elapsed}", "bright_black")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="left",
        box=box.ROUNDED,
        border_style="bright_black",
        padding=(1, 2),
        width=100,
    )


def _roles_table(snapshot: Snapshot) -> RenderableType:
    if not snapshot.roles or snapshot.state in ("queued", "left"):
        return Text(nothing_runs(snapshot), "bright_black")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", expand=True)
    table.add_column("role", max_width=20, no_wrap=True, overflow="ellipsis")
    for column in ("rank", "address", "state", "since"):
        table.add_column(column, no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    shown = most_relevant(snapshot.roles, MAX_ROLES)
    for role in shown:
        since = clock(snapshot.until - role.since) if role.since else ""
        silence = f"silent for {clock(snapshot.time - role.silent)}" if role.silent else ""
        restarts = f"restarts in place: {len(role.restarts)}" if role.restarts and role.state == "ready" else ""
        quiet = "; ".join(filter(None, (role.detail, restarts)))
        detail = Text(silence, UNSURE) if silence else Text(quiet, "bright_black")
        rank = f"+{role.attached}" if role.attached else str(role.rank)
        table.add_row(role.name, rank, role.address, _role_state(role, snapshot), since, detail)
    if len(shown) < len(snapshot.roles):
        table.add_row(Text(f"and {len(snapshot.roles) - len(shown)} more, ready", "bright_black"))
    return table


def _missing_servers(snapshot: Snapshot) -> list[RenderableType]:
    text = "" if snapshot.is_over else servers_text(snapshot.servers)
    return [Text(text, UNSURE)] if text else []


def servers_text(servers: Sequence[RoleLine]) -> str:
    """A text such as `3 of 4 servers ready`; empty if all are, or if there is one."""
    ready = sum(server.state == "ready" for server in servers)
    return f"{ready} of {len(servers)} servers ready" if ready < len(servers) > 1 else ""


def _role_state(role: RoleLine, snapshot: Snapshot) -> Text:
    """The last known state of a role."""
    cut_off = snapshot.is_over and role.state not in ("stopped", "failed")
    color = UNSURE if role.silent else "bright_black" if cut_off else COLORS.get(role.state, "")
    return Text(f"{'○' if cut_off or role.silent else '●'} {role.state}", color)


def state_text(snapshot: Snapshot) -> str:
    """The state, such as `training` or `interrupted (CANCELLED)`: at the end with the scheduler's state, if known."""
    word = snapshot.job.word if snapshot.job and snapshot.ended else ""
    return f"{snapshot.state} ({word})" if word else snapshot.state


def attempt_text(snapshot: Snapshot) -> str:
    """The attempt's name, with its restart number and their limit."""
    job = snapshot.job
    if not snapshot.attempt:
        return f"job {job.id} · no attempt yet" if job else "no attempt yet"
    if job is None:
        return f"attempt {snapshot.attempt}"
    most = f" of {job.most_restarts}" if job.most_restarts is not None else ""
    return f"attempt {snapshot.attempt} · restart {job.restart}{most}"


def nothing_runs(snapshot: Snapshot) -> str:
    """Why there are no roles to show."""
    if snapshot.state == "not submitted":
        return f"no job of this run was submitted; the command that made it ({user_command('submit')} …) submits it"
    if snapshot.ended:
        return "the job ended before its roles were started"
    if snapshot.job is None or snapshot.state not in ("queued", "left"):
        return "the ranks are meeting …" if snapshot.attempt else "waiting for the job to start …"
    word = f": {snapshot.job.word}" if snapshot.job.word else ""
    if snapshot.state == "left":
        return f"job {snapshot.job.id} was ended by the scheduler, or queued again; {user_command('runs')} shows which"
    return f"{'queued again' if snapshot.attempt else 'queued'} as job {snapshot.job.id}{word} …"


def _past_table(snapshot: Snapshot) -> RenderableType:
    """The last attempts that have ended, one line each."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", expand=True)
    table.add_column("attempt", no_wrap=True)
    table.add_column("ran", no_wrap=True, justify="right")
    table.add_column("then", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    hidden = len(snapshot.past) - MAX_PAST
    if hidden > 0:
        table.add_row(Text(f"{hidden} earlier", "bright_black"))
    for past in snapshot.past[-MAX_PAST:]:
        ran = clock(past.seconds) if past.began else "—"
        table.add_row(past.name, ran, Text(past.end, COLORS.get(past.end, "")), Text(past.why, "bright_black"))
    return table


def silence_text(snapshot: Snapshot) -> str:
    """The ranks without a heartbeat, with the seconds since their last one."""
    ranks = [f"{rank} ({clock(snapshot.time - since)})" for rank, since in sorted(snapshot.silent.items())]
    more = f" and {len(ranks) - MAX_ROLES} more" if len(ranks) > MAX_ROLES else ""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"no sign of life from {noun} {', '.join(ranks[:MAX_ROLES])}{more}: the node or its filesystem hangs"


def no_answer(job: JobLine) -> str:
    """The note that the scheduler did not answer, and why."""
    return f"no answer about job {job.id}; the state is from files alone: {job.trouble}"


def most_relevant(roles: Sequence[RoleLine], most: int) -> list[RoleLine]:
    """At most `most` roles, in their order. Roles that are not ready or silent take precedence."""
    if len(roles) <= most:
        return list(roles)
    chosen = sorted(range(len(roles)), key=lambda index: (_is_well(roles[index]), index))[:most]
    return [roles[index] for index in sorted(chosen)]


def _is_well(role: RoleLine) -> bool:
    return role.state == "ready" and not role.silent


def _progress_line(snapshot: Snapshot) -> RenderableType:
    progress = snapshot.progress or snapshot.upcoming_phases or Progress("rl", 0, 0, None)
    return _bar(job_text(progress), progress.step, progress.steps, step_text(progress))


def _evaluation_line(snapshot: Snapshot) -> list[RenderableType]:
    """The bar of the running evaluation, if there is one."""
    evaluation = snapshot.evaluation
    return [_bar("evaluation", evaluation.done, evaluation.prompts, evaluation_text(evaluation))] if evaluation else []


def _bar(name: str, done: int, total: int, text: str) -> RenderableType:
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(width=12)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="blue", finished_style="green")
    row.add_row(name, bar, text)
    return row


def evaluation_text(evaluation: EvaluationProgress) -> str:
    """A text such as `first evaluation: evaluating held_out, 3 / 32 prompts`."""
    first = "first evaluation: " if evaluation.first else ""
    return f"{first}{evaluation.what}, {evaluation.done} / {evaluation.prompts} prompts"


def job_text(progress: Progress) -> str:
    """The label of the training job: SFT, preferences or RL, or the name of a job file."""
    if progress.file:
        return progress.file
    if progress.job == "sft":
        return "SFT"
    if progress.job == "preference":
        return "preferences"
    return "training"


def step_text(progress: Progress) -> str:
    """A text such as `40 / 60 · 0:08 left`."""
    text = f"{progress.step} / {progress.steps}" if progress.steps else f"{progress.step}"
    left = progress.seconds_left
    return f"{text} · {clock(left)} left" if left else text


def _figures(snapshot: Snapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(width=12, no_wrap=True)
    grid.add_column(width=18, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for name, value, more in figures_of(snapshot):
        grid.add_row(
            Text(name, "bright_black"), Text(value, "bold"), Text(more, "blue" if more[:1] in _BARS else "bright_black")
        )
    return grid


def figures_of(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """The (name, value, details) of each displayed number; a number without a value is an em dash."""
    numbers, scores = snapshot.numbers, [value for _, value in snapshot.accuracies]
    speed = ("tokens/s", _count(numbers.get("tokens_per_second")), _idle_text(numbers))
    if not snapshot.has_rollouts:
        loss = ("loss", number(numbers.get("loss"), ".3f"), sparkline(snapshot.losses))
        return [loss, ("grad norm", number(numbers.get("grad_norm"), ".2f"), ""), speed]
    first_last = (
        f"{scores[0]:.3f} → {scores[-1]:.3f}" if len(scores) > 1 else number(scores[-1] if scores else None, ".3f")
    )
    lag = f"{number(numbers.get('staleness/mean'), '.1f')} / {number(numbers.get('staleness/max'), '.0f')}"
    limit = "mean / largest" + (f", limit {snapshot.max_lag}" if snapshot.max_lag is not None else "")
    return [
        ("reward", number(snapshot.rewards[-1] if snapshot.rewards else None, ".3f"), sparkline(snapshot.rewards)),
        ("held-out", first_last, sparkline(scores)),
        ("lag", lag if "staleness/mean" in numbers else "—", limit if "staleness/mean" in numbers else ""),
        speed,
    ]


def _idle_text(numbers: dict[str, float]) -> str:
    waits = [f"{name.removeprefix('idle/')} {value:.0%}" for name, value in numbers.items() if name.startswith("idle/")]
    return f"idle: {', '.join(waits)}" if waits else ""


def _events(events: Sequence[Event], notices: Sequence[Notice]) -> RenderableType:
    """The last notices, then the events."""
    shown = [(notice.time, f"{notice.by}: {notice.text}") for notice in notices[-MAX_NOTICES:]]
    shown += [(event.time, _event_text(event)) for event in events]
    lines = [f"{moment(at, '%H:%M:%S', local=True)}  {text}" for at, text in shown]
    return Text("\n".join(lines), "bright_black", overflow="ellipsis", no_wrap=True)


def _event_text(event: Event) -> str:
    return f"{event.name.replace('_', ' ')} ({event.by})" + (f": {event.detail}" if event.detail else "")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as bars, averaged down to at most `width` of them; empty for fewer than two."""
    if len(values) < 2:
        return ""
    cells = min(width, len(values))
    edges = [round(cell * len(values) / cells) for cell in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[min(7, int(8 * (mean - low) / span))] if span else _BARS[0] for mean in means)


def _count(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
