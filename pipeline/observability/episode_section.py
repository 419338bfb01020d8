"""The episodes on a run's page: a list with search, filters and pages, which works offline.

A page has at most `MAX_EPISODES` episodes and `MAX_BYTES` of their texts: the best, worst, slowest and longest ones,
truncated and failed ones, and others evenly over the run. `launchers/samples.py` shows all stored ones.

The texts are untrusted. They are data in a JSON block, in which no character can end the block, and the script
(`episode_script`) writes them as text nodes. The page's policy admits this script only, by its hash, and no address.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from math import isfinite
from typing import Any

from pipeline.config.model_directory import model_directory
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import ConfigError
from pipeline.observability.conversation_view import SampleReader
from pipeline.observability.episode_script import CONTROLS, SCRIPT
from pipeline.observability.episode_view import TIMES, ShownTurn, syntax_of, turn_facts, turns_of, visible
from pipeline.observability.number_format import plural
from pipeline.observability.run_history import History
from pipeline.observability.sample_panel import fact_pairs
from pipeline.observability.sample_reader import Filter, ReadSample, SampleTable, read_samples
from pipeline.utils.user_commands import user_command

MAX_EPISODES = 300
MAX_BYTES = 4 << 20
"""Upper bound of the data, before the last episode."""
MAX_OF_KIND = 25
"""Number of the best episodes, of the worst, and so on."""
MAX_SEGMENTS = 20
"""Number of files from which the other episodes are taken: each is read whole."""
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{b64encode(sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""The page's Content-Security-Policy."""


def episodes_section(history: History) -> str:
    """The section as HTML; empty for a run without stored samples."""
    stored = read_samples(history.paths)
    if not len(stored):
        return ""
    episodes = _within_bytes(_records(history, chosen(stored)))
    note = (
        f"{plural(len(episodes), 'episode')} of {len(stored)} stored: the best, worst, slowest, longest, cut off and "
        f"failed ones, and others evenly over the run. {user_command('samples')} run={history.name} searches all."
    )
    # `</script` cannot occur in the data: it has no `<`.
    data = f"[{','.join(episodes)}]"
    return (
        f'<section id="episodes"><h2>Episodes</h2><p class="note">{escape(note)}</p>{CONTROLS}'
        f'<script type="application/json" id="episode-data">{data}</script><script>{SCRIPT}</script></section>'
    )


def chosen(stored: SampleTable) -> SampleTable:
    """The samples on the page, in the order of their storage."""
    kinds = [stored.ranked(name).slice(0, MAX_OF_KIND) for name in ("reward", "seconds", "length", "turns")]
    kinds.append(stored.worst(MAX_OF_KIND))
    kinds += [stored.where(criteria).newest(MAX_OF_KIND) for criteria in (Filter(failed=True), Filter(cut=True))]
    special = stored.within(kinds)
    return stored.within([special, stored.spread(MAX_EPISODES - len(special), MAX_SEGMENTS)])


def _within_bytes(records: Iterator[dict[str, Any]]) -> list[str]:
    """The records as JSON, until they have `MAX_BYTES`."""
    encoded, size = list[str](), 0
    for record in records:
        if size >= MAX_BYTES:
            break
        encoded.append(json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_ESCAPES))
        size += len(encoded[-1].encode())
    return encoded


def _records(history: History, samples: SampleTable) -> Iterator[dict[str, Any]]:
    reader = SampleReader(_model_directory(history))
    for sample in samples.load():
        yield _record(sample, reader, syntax_of(history.config, sample["eval_set"], sample["task"]))


def _model_directory(history: History) -> Any:
    try:
        return model_directory(history.config.model) if history.config else history.paths.root
    except ConfigError:
        return history.paths.root  # has no tokenizer, so that tokens are shown by their ids


def _record(sample: ReadSample, reader: SampleReader, syntax: ToolCallSyntax) -> dict[str, Any]:
    """An episode for the script; every text is visible already."""
    columns = ("reward", "length", "turns", "seconds", "position", "sample", "version_min", "time")
    return {
        **{name: _finite(sample[name]) for name in columns},
        "task": visible(sample["task"]),
        "set": visible(sample["eval_set"]) if sample["eval_set"] else "",
        "failure": None if sample["failure"] is None else visible(sample["failure"]),
        "cut": sample["finish"] == "length",
        "facts": [[visible(name), visible(value)] for name, value in fact_pairs(sample)],
        "body": [_turn(turn) for turn in turns_of(sample, reader, syntax) if turn.sampled or turn.text.strip()],
    }


def _turn(turn: ShownTurn) -> dict[str, Any]:
    record: dict[str, Any] = {"role": turn.role, "row": turn.row, "text": visible(turn.text)}
    if turn.sampled:
        record |= {"number": turn.number, "calls": [visible(call) for call in turn.calls]}
        record["facts"] = [[name, visible(value)] for name, value in turn_facts(turn)]
    if turn.times is not None:
        record["times"] = {name: _finite(turn.times[name]) for name in ("begin", *TIMES)}
    return record


def _finite(value: float | None) -> float | None:
    """The value, or None for one that JSON does not have, such as the reward of a group that was refused."""
    return value if value is not None and isfinite(value) else None
