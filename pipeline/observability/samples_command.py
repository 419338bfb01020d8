"""The command that shows samples in the terminal: `launchers/samples.py run=…`.

A run that does not exist or has no stored samples gives one error line and exit code 2. With `--json`, the output is
one JSON object per line and nothing else.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.model_directory import model_directory
from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.conversation_view import POLICY, Passage, SampleReader
from pipeline.observability.number_format import number
from pipeline.observability.run_history import find_run
from pipeline.observability.sample_reader import Filter, ReadSample, SampleRow, SampleTable, read_samples
from pipeline.run.paths import RunPaths
from pipeline.utils.terminal import console, escape_controls
from pipeline.utils.user_commands import user_command

SHOWN = 5
"""The default number of samples."""
COLORS = {"system": "magenta", "user": "cyan", "tool": "yellow", POLICY: "green", "prompt": "cyan"}
EXAMPLES = (
    "run=demo --worst 3",
    "run=demo --reward :0 --length 200: --tokens",
    "run=demo --failed --json | jq .failure",
)
RANGES = "A range LOW:HIGH includes both ends; either may be left out."


def main(arguments: Sequence[str]) -> int:
    """Show the samples of the run that the arguments name. Returns the exit code."""
    try:
        options, rest = _parser().parse_known_args(list(arguments))
        if unknown := [word for word in rest if word.startswith("-")]:
            raise ConfigError("option", unknown[0], "one that --help lists", "the run is named by run=…")
        run = RunPaths(find_run(rest))
        _show(run, options)
    except argparse.ArgumentError as error:
        wrong = ConfigError("option", " ".join(arguments), "options that --help lists", str(error))
        print(f"error: {wrong}", file=sys.stderr)
        return wrong.exit_code
    except RollcallError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    command = user_command("samples")
    parser = argparse.ArgumentParser(
        prog=command,
        description=f"Read the samples that a run kept: {command} run=<name or directory> …",
        epilog="\n".join([*(f"{command} {example}" for example in EXAMPLES), RANGES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", type=_count, metavar="N", help="the N of the highest reward")
    order.add_argument("--worst", type=_count, metavar="N", help="the N of the lowest reward")
    order.add_argument("--last", type=_count, metavar="N", help=f"the N newest (default: {SHOWN})")
    order.add_argument("--all", action="store_true", help="all, the oldest first")
    parser.add_argument("--reward", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="reward")
    parser.add_argument(
        "--length", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="tokens, prompt included"
    )
    parser.add_argument("--versions", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="oldest weights")
    parser.add_argument("--failed", action="store_true", help="samples that failed")
    parser.add_argument("--failure", default="", metavar="TEXT", help="samples whose reason has this text")
    parser.add_argument("--cut", action="store_true", help="samples that were cut off")
    parser.add_argument("--task", default="", metavar="NAME", help="of this task")
    parser.add_argument("--train", action="store_const", dest="kind", const="train", default="", help="of training")
    parser.add_argument("--eval", action="store_const", dest="kind", const="eval", help="of evaluations")
    parser.add_argument("--set", default="", metavar="NAME", help="of this evaluation set (held_out: the run's own)")
    parser.add_argument("--position", type=int, metavar="P", help="of this place in the run's order of prompts")
    parser.add_argument("--tokens", action="store_true", help="each token with its log-probability and mask")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _range(text: str) -> tuple[float, float]:
    """The two bounds of a range such as `0.5:1`, `:0` or `200:`."""
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(low or -inf), float(high or inf)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range LOW:HIGH, such as 0.5:1, :0 or 200:") from None


def _show(run: RunPaths, options: argparse.Namespace) -> None:
    stored = read_samples(run)
    if not len(stored):
        hint = "a run stores them as it goes, unless rollout.sample_store_bytes=0"
        raise ConfigError("run", run.root.name, f"a run that kept samples, and {run.rollouts} has none", hint)
    matches = stored.where(_filter(options))
    chosen = _ordered(matches, options)
    reader = _reader(run)
    if options.json:
        for sample in chosen.load():
            print(msgspec.json.encode(as_json(sample, reader)).decode())
        return
    screen, shown = console(highlight=False), 0
    for sample in chosen.load():
        screen.print(rendered(sample, reader, tokens=options.tokens))
        shown += 1
    screen.print(Text(f"{shown} of {len(matches)} matching samples, of {len(stored)} stored", "bright_black"))


def _filter(options: argparse.Namespace) -> Filter:
    return Filter(
        kind=options.kind,
        eval_set=options.set,
        task=options.task,
        least_reward=options.reward[0],
        most_reward=options.reward[1],
        least_length=options.length[0],
        most_length=options.length[1],
        first_version=options.versions[0],
        last_version=options.versions[1],
        failed=options.failed,
        failure=options.failure,
        cut=options.cut,
        position=options.position,
    )


def _ordered(matches: SampleTable, options: argparse.Namespace) -> SampleTable:
    orders: list[tuple[int | None, Callable[[int], SampleTable]]] = [
        (options.best, matches.best),
        (options.worst, matches.worst),
        (options.last, matches.newest),
    ]
    for count, order in orders:
        if count:
            return order(count)
    return matches if options.all else matches.newest(SHOWN)


def _reader(run: RunPaths) -> SampleReader:
    """The reader for the run's model. If its directory is missing on this machine, tokens are shown as ids."""
    config = read_frozen_config(run)
    try:
        return SampleReader(model_directory(config.model) if config else Path())
    except ConfigError:
        return SampleReader(Path())


def as_json(sample: ReadSample, reader: SampleReader) -> dict[str, Any]:
    """A sample as plain values: its columns, the ledger's record of its position, and its conversation."""
    values = dict(sample.values)
    rows = [reader.parts(row.tokens, row.mask) for row in sample.rows()]
    ledger = {"step": sample.step, "lag": sample.lag, "settled": sample.outcome or None}
    turns = [{"row": index, "role": part.role, "text": part.text} for index, row in enumerate(rows) for part in row]
    return values | ledger | {"conversation": turns}


def rendered(sample: ReadSample, reader: SampleReader, *, tokens: bool = False) -> RenderableType:
    """One sample as a panel: a title line, its conversation, and its named numbers."""
    body: list[RenderableType] = []
    if sample["failure"] is not None:
        body.append(Text(escape_controls(sample["failure"]), "red"))
    rows = sample.rows()
    for number_of_row, row in enumerate(rows, 1):
        body += [Text(f"row {number_of_row} of {len(rows)}", "bright_black")] if len(rows) > 1 else []
        body += [token_lines(row, reader)] if tokens else conversation(reader.parts(row.tokens, row.mask))
    body += [Text(), facts(sample)]
    return Panel(Group(*body), title=_title(sample), title_align="left", border_style="bright_black")


def _title(sample: ReadSample) -> Text:
    label = f"{sample['eval_set']}, prompt" if sample["eval_set"] else "position"
    head = f" {sample['task']} · {label} {sample['position']} · sample {sample['sample']} "
    reward = "failed" if sample["reward"] is None else f"reward {sample['reward']:g}"
    color = "red" if sample["reward"] is None else "bold"
    return Text.assemble((head, "bright_black"), (f"{reward} ", color))


def conversation(parts: Iterable[Passage]) -> list[RenderableType]:
    """The turns, each below its role. Sampled text is bold."""
    lines: list[RenderableType] = []
    for part in parts:
        color = COLORS.get(part.role, "")
        lines.append(Text(part.role, f"{color} dim"))
        lines.append(Text(escape_controls(part.text), f"{color} bold" if part.sampled else color))
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
    return Columns([Text.assemble((f"{name} ", "bright_black"), value) for name, value in pairs], padding=(0, 3))
