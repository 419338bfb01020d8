"""An episode as both views show it: its turns, the tool calls and results, and where and how fast each was sampled.

    for turn in turns_of(sample, reader, syntax): …        # ShownTurn, in the order of the tokens
    turn_facts(turn)                                       # [("server", "127.0.0.1:8000"), ("queue", "2 ms"), …]

A run that recorded no times of turns has the same turns without them. Texts are raw: each view escapes them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

from pipeline.config import RunConfig
from pipeline.environments.tool_call_syntax import ToolCall, ToolCallSyntax, parse_calls
from pipeline.observability.conversation_view import INPUT, POLICY, Passage, SampleReader
from pipeline.observability.sample_reader import ReadSample
from pipeline.utils.terminal import escape_controls

TOOL, USER = "tool", "user"
"""The role of a tool's result, and that under which some templates write it."""
MAX_TEXT = 4000
"""Number of characters of a turn that the page shows, and the terminal without `--full`."""
SYNTAX_OPTION = "tool_call_syntax"
TIMES = ("queue", "prefill", "decode", "tools", "request")
"""The times of a turn in the order in which they are shown (`pipeline.transport.turn_times`)."""
_MILLISECOND, _MINUTE = 1e-3, 60.0
_DEFAULT: ToolCallSyntax = "tagged"


@dataclass(frozen=True)
class ShownTurn:
    """A turn, or a part of one.

    Attributes:
        role, text, sampled: as in `Passage`. What follows a turn that called tools has the role `tool`, also where the
            template has none, or writes results as a user's message.
        row: the row of the episode.
        number: the number of the policy's turn in its row, from 1; None for other roles.
        calls: the tool calls in the text, each as the tool's name and its arguments.
        versions: the oldest and the newest policy version that sampled a token; None if not recorded.
        times: the fields of its `TurnTimes`; None if not recorded.
    """

    role: str
    text: str
    sampled: bool
    row: int
    number: int | None = None
    calls: tuple[str, ...] = ()
    versions: tuple[int, int] | None = None
    times: Mapping[str, Any] | None = None


def syntax_of(config: RunConfig | None, eval_set: str | None = None, label: str = "") -> ToolCallSyntax:
    """The tool-call syntax of a run's task, or of the task of one of its evaluation sets. `label` is the sample's task,
    which is one of several in a mix."""
    if config is None:
        return _DEFAULT
    own = config.evaluation.sets.get(eval_set or "")
    task = own.task if own is not None and own.task is not None else config.task
    options = next((entry.options for entry in task.tasks if entry.title == label), task.options)
    name = options.get(SYNTAX_OPTION)
    return next((syntax for syntax in get_args(ToolCallSyntax) if syntax == name), _DEFAULT)


def turns_of(sample: ReadSample, reader: SampleReader, syntax: ToolCallSyntax = _DEFAULT) -> list[ShownTurn]:
    """The turns of a sample, row by row; empty for a failed sample."""
    turns, begin = list[ShownTurn](), 0
    versions = sample.values.get("versions") or []
    for index, row in enumerate(sample.rows()):
        own = versions[begin : begin + len(row.tokens)]
        begin += len(row.tokens)
        times = [entry for entry in sample.values.get("turn_times") or () if entry["row"] == index]
        turns += _numbered(_turns_of_row(row.tokens, row.mask, own, times, reader, syntax, index))
    return turns


def _turns_of_row(
    tokens: Sequence[int],
    mask: Sequence[int],
    versions: Sequence[int],
    times: Sequence[Mapping[str, Any]],
    reader: SampleReader,
    syntax: ToolCallSyntax,
    row: int,
) -> Iterator[ShownTurn]:
    """The turns of one row. A row is cut where a turn begins, so that two turns without input in between stay two."""
    by_start = {entry["start"]: entry for entry in times if 0 <= entry["start"] < len(tokens)}
    edges = sorted({0, *by_start, len(tokens)})
    for begin, end in pairwise(edges):
        recorded, called = by_start.get(begin), False
        for passage in reader.parts(tokens[begin:end], mask[begin:end]):
            if not passage.sampled:
                yield _input(passage, row, is_result=called)
                continue
            count = _run_length(mask, begin, end)
            yield ShownTurn(
                role=passage.role,
                text=passage.text,
                sampled=True,
                row=row,
                calls=tuple(map(_written, parse_calls(passage.text, syntax, {}))),
                versions=_range(versions[begin : begin + count]) if recorded is not None else _range_of(versions, mask),
                times=recorded,
            )
            called = recorded is not None and recorded["tools"] is not None
            recorded = None  # of the first turn of the part; a further one has no record


def _input(passage: Passage, row: int, *, is_result: bool) -> ShownTurn:
    role = TOOL if is_result and passage.role in (INPUT, USER) else passage.role
    return ShownTurn(role, passage.text, False, row)


def _run_length(mask: Sequence[int], begin: int, end: int) -> int:
    """The number of sampled tokens from `begin` on."""
    return next((index - begin for index in range(begin, end) if not mask[index]), end - begin)


def _range(versions: Sequence[int]) -> tuple[int, int] | None:
    return (min(versions), max(versions)) if versions else None


def _range_of(versions: Sequence[int], mask: Sequence[int]) -> tuple[int, int] | None:
    """The versions of a row whose turns have no record."""
    return _range([version for version, sampled in zip(versions, mask, strict=False) if sampled])


def _numbered(turns: Iterator[ShownTurn]) -> Iterator[ShownTurn]:
    """The turns with the numbers of the policy's turns."""
    number = 0
    for turn in turns:
        number += turn.sampled
        yield replace(turn, number=number) if turn.sampled and turn.role == POLICY else turn


def _written(call: ToolCall) -> str:
    """A call in one line."""
    if call.wrong:
        return f"{call.name}: {call.wrong}"
    plain = list(call.arguments) in ([], [""])  # the short syntax has no names of arguments
    arguments = str(call.arguments.get("", "")) if plain else json.dumps(dict(call.arguments), ensure_ascii=False)
    return f"{call.name}({arguments})"


def turn_facts(turn: ShownTurn) -> list[tuple[str, str]]:
    """The server, the policy version and the times of a turn, as names and texts; what is not recorded is left out."""
    facts = []
    times = turn.times or {}
    if times.get("server"):
        facts.append(("server", str(times["server"])))
    if turn.versions is not None:
        oldest, newest = turn.versions
        facts.append(("weights", str(oldest) if oldest == newest else f"{oldest}–{newest}"))
    return facts + [(name, duration(times[name])) for name in TIMES if times.get(name) is not None]


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `0.4 ms`, `153 ms`, `2.31 s`, `75 s`."""
    if seconds < 1:
        value = round(seconds / _MILLISECOND, 1)  # stored as float32, in which 0.01 is 0.0099999998
        return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
    return f"{seconds:.2f} s" if seconds < _MINUTE else f"{seconds:.0f} s"


def visible(text: str, limit: int | None = MAX_TEXT) -> str:
    """A text for a reader: without control and bidirectional characters, whose place their numbers take, and with at
    most `limit` characters, the first and last ones."""
    if limit is not None and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
    return escape_controls(text)
