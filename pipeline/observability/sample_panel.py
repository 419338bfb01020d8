"""A sample in the terminal: a panel with its turns, their tool calls and times, and its numbers."""

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.observability.conversation_view import POLICY, SampleReader
from pipeline.observability.episode_view import MAX_TEXT, TOOL, ShownTurn, turn_facts, turns_of, visible
from pipeline.observability.number_format import number
from pipeline.observability.sample_reader import ReadSample, SampleRow

COLORS = {"system": "magenta", "user": "cyan", TOOL: "yellow", POLICY: "green", "prompt": "cyan"}
_QUIET = "bright_black"


def rendered(
    sample: ReadSample,
    reader: SampleReader,
    syntax: ToolCallSyntax = "tagged",
    *,
    tokens: bool = False,
    full: bool = False,
) -> RenderableType:
    """One sample as a panel: a title line, its turns or its `tokens`, and its numbers. Without `full`, the middle of a
    long turn is left out."""
    body: list[RenderableType] = []
    if sample["failure"] is not None:
        body.append(Text(visible(sample["failure"], None), "red"))
    rows = sample.rows()
    turns = [] if tokens else turns_of(sample, reader, syntax)
    for index, row in enumerate(rows):
        body += [Text(f"row {index + 1} of {len(rows)}", _QUIET)] if len(rows) > 1 else []
        of_row = [turn for turn in turns if turn.row == index]
        body += [token_lines(row, reader)] if tokens else conversation(of_row, None if full else MAX_TEXT)
    body += [Text(), facts(sample)]
    return Panel(Group(*body), title=_title(sample), title_align="left", border_style=_QUIET)


def _title(sample: ReadSample) -> Text:
    label = f"{sample['eval_set']}, prompt" if sample["eval_set"] else "position"
    head = f" {sample['task']} · {label} {sample['position']} · sample {sample['sample']} "
    reward = "failed" if sample["reward"] is None else f"reward {sample['reward']:g}"
    color = "red" if sample["reward"] is None else "bold"
    return Text.assemble((visible(head), _QUIET), (f"{reward} ", color))


def conversation(turns: Iterable[ShownTurn], limit: int | None = MAX_TEXT) -> list[RenderableType]:
    """The turns, each below its role and its times. Sampled text is bold, and followed by its tool calls."""
    lines: list[RenderableType] = []
    for turn in turns:
        if not turn.sampled and not turn.text.strip():
            continue  # line ends that the template writes between two messages
        color = COLORS.get(turn.role, "")
        name = turn.role if turn.number is None else f"{turn.role} {turn.number}"
        times = "".join(f" · {fact} {value}" for fact, value in turn_facts(turn))
        lines.append(Text.assemble((name, f"{color} dim"), (visible(times), _QUIET)))
        lines.append(Text(visible(turn.text, limit), f"{color} bold" if turn.sampled else color))
        lines += [Text(f"→ {visible(call, limit)}", COLORS[TOOL]) for call in turn.calls]
    return lines


def token_lines(row: SampleRow, reader: SampleReader) -> Text:
    """One token per line: index, id, mask, log-probability and text. Sampled tokens are green."""
    text = Text()
    for index, (token, sampled, logprob) in enumerate(zip(*row, strict=True)):
        shown = f"{logprob:9.4f}" if sampled else " " * 9
        text.append(f"{index:6} {token:7} {sampled} {shown}  {reader.text([token])!r}\n", "green" if sampled else "")
    return text


def facts(sample: ReadSample) -> RenderableType:
    """The numbers of a sample: advantage, step, lag, policy versions, lengths, times and metrics."""
    pairs = [(visible(name), visible(value)) for name, value in fact_pairs(sample)]
    return Columns([Text.assemble((f"{name} ", _QUIET), value) for name, value in pairs], padding=(0, 3))


def fact_pairs(sample: ReadSample) -> list[tuple[str, str]]:
    """The names and the values of a sample's numbers, as texts that are not escaped."""
    versions = f"{sample['version_min']}–{sample['version_max']}" if sample["version_min"] is not None else "—"
    pairs = [
        ("advantage", number(sample["advantage"], "+.3f")),
        ("trained at step", "—" if sample.step is None else str(sample.step)),
        ("lag", "—" if sample.lag is None else str(sample.lag)),
        ("weights", versions),
        ("tokens", f"{sample['length'] or 0} ({sample['sampled'] or 0} sampled)"),
        ("turns", number(sample["turns"], "d")),
        ("finish", sample["finish"] or "—"),
        ("seconds", number(sample["seconds"], ".2f")),
        ("server", sample["server"] or "—"),
        *((name, f"{value:g}") for name, value in sorted((sample["metrics"] or {}).items())),
    ]
    if sample["outcome"] not in (None, "train"):
        pairs.append(("group", sample["outcome"]))
    return pairs
