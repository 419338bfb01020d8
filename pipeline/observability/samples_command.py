"""The command that shows samples in the terminal: `launchers/samples.py run=…`.

A run that does not exist or has no stored samples gives one error line and exit code 2. With `--json`, the output is
one JSON object per line and nothing else.
"""

import argparse
import sys
from collections.abc import Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from pipeline.config import RunConfig
from pipeline.config.frozen_config import read_frozen_config
from pipeline.config.model_directory import model_directory
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import ConfigError, RollcallError
from pipeline.observability.conversation_view import SampleReader
from pipeline.observability.episode_view import syntax_of, turns_of
from pipeline.observability.run_history import find_run
from pipeline.observability.sample_panel import rendered
from pipeline.observability.sample_reader import Filter, ReadSample, SampleTable, read_samples
from pipeline.run.paths import RunPaths
from pipeline.utils.terminal import console
from pipeline.utils.user_commands import user_command

SHOWN = 5
"""The default number of samples, which is a page."""
EXAMPLES = (
    "run=demo --worst 3",
    "run=demo --worst 3 --page 2",
    "run=demo --text calculator --turns 2: --slowest 5",
    "run=demo --reward :0 --length 200: --tokens",
    "run=demo --failed --json | jq .failure",
)
LONGEST_NUMBER = 15
"""Digits of an option's number, so that sums of two fit into the index's 64 bits."""
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
    order.add_argument("--longest", type=_count, metavar="N", help="the N with the most tokens")
    order.add_argument("--slowest", type=_count, metavar="N", help="the N that took the most seconds")
    order.add_argument("--last", type=_count, metavar="N", help=f"the N newest (default: {SHOWN})")
    order.add_argument("--all", action="store_true", help="all, the oldest first")
    parser.add_argument("--page", type=_count, default=1, metavar="P", help="the Pth N of that order (default: 1)")
    parser.add_argument("--text", default="", metavar="TEXT", help="samples whose turns or failure contain this text")
    parser.add_argument("--reward", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="reward")
    parser.add_argument(
        "--length", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="tokens, prompt included"
    )
    parser.add_argument("--turns", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="turns of the policy")
    parser.add_argument("--seconds", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="wall time")
    parser.add_argument("--versions", type=_range, default=(-inf, inf), metavar="LOW:HIGH", help="oldest weights")
    parser.add_argument("--failed", action="store_true", help="samples that failed")
    parser.add_argument("--failure", default="", metavar="TEXT", help="samples whose reason has this text")
    parser.add_argument("--cut", action="store_true", help="samples that were cut off")
    parser.add_argument("--task", default="", metavar="NAME", help="of this task")
    parser.add_argument("--train", action="store_const", dest="kind", const="train", default="", help="of training")
    parser.add_argument("--eval", action="store_const", dest="kind", const="eval", help="of evaluations")
    parser.add_argument("--set", default="", metavar="NAME", help="of this evaluation set (held_out: the run's own)")
    parser.add_argument("--position", type=_position, metavar="P", help="of this place in the run's order of prompts")
    parser.add_argument("--tokens", action="store_true", help="each token with its log-probability and mask")
    parser.add_argument("--full", action="store_true", help="long turns whole, not only their begin and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def _count(text: str) -> int:
    if (number := _position(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _position(text: str) -> int:
    if not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at most {LONGEST_NUMBER} digits")
    return int(text)


def _range(text: str) -> tuple[float, float]:
    """The two bounds of a range such as `0.5:1`, `:0` or `200:`."""
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or -inf), float(high or inf)
        if not colon or any(map(isnan, bounds)):
            raise ValueError
        return bounds
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range LOW:HIGH, such as 0.5:1, :0 or 200:") from None


def _show(run: RunPaths, options: argparse.Namespace) -> None:
    stored = read_samples(run)
    if not len(stored):
        hint = "a run stores them as it goes, unless rollout.sample_store_bytes=0"
        raise ConfigError("run", run.root.name, f"a run that kept samples, and {run.rollouts} has none", hint)
    config = read_frozen_config(run)
    reader = _reader(config)
    matches = stored.where(_filter(options))
    if options.text:
        matches = matches.containing(options.text, reader.text)
    chosen, pages = _page(matches, options)
    if options.json:
        for sample in chosen.load():
            print(msgspec.json.encode(as_json(sample, reader, _syntax(config, sample))).decode())
        return
    screen, shown = console(highlight=False), 0
    for sample in chosen.load():
        screen.print(rendered(sample, reader, _syntax(config, sample), tokens=options.tokens, full=options.full))
        shown += 1
    screen.print(Text(_footer(shown, len(matches), len(stored), options.page, pages), "bright_black"))


def _footer(shown: int, matches: int, stored: int, page: int, pages: int) -> str:
    counts = f"{shown} of {matches} matching samples, of {stored} stored"
    if pages < 2:
        return counts
    following = f"; --page {page + 1} shows the next" if page < pages else ""
    return f"{counts}; page {page} of {pages}{following}"


def _filter(options: argparse.Namespace) -> Filter:
    return Filter(
        kind=options.kind,
        eval_set=options.set,
        task=options.task,
        least_reward=options.reward[0],
        most_reward=options.reward[1],
        least_length=options.length[0],
        most_length=options.length[1],
        least_turns=options.turns[0],
        most_turns=options.turns[1],
        least_seconds=options.seconds[0],
        most_seconds=options.seconds[1],
        first_version=options.versions[0],
        last_version=options.versions[1],
        failed=options.failed,
        failure=options.failure,
        cut=options.cut,
        position=options.position,
    )


def _page(matches: SampleTable, options: argparse.Namespace) -> tuple[SampleTable, int]:
    """The samples of the page that the options name, and the number of pages; `ConfigError` beyond the last one."""
    orders = [
        (len(matches) if options.all else None, "", False),
        (options.best, "reward", False),
        (options.worst, "reward", True),
        (options.longest, "length", False),
        (options.slowest, "seconds", False),
    ]
    size, column, ascending = next((order for order in orders if order[0]), (options.last or SHOWN, "", False))
    ranked = matches.ranked(column, ascending=ascending) if column else matches
    pages = max(1, -(-len(ranked) // size))
    if options.page > pages:
        raise ConfigError("--page", options.page, f"at most {pages}, the pages of {size} matching samples", "lower it")
    if column:
        return ranked.slice((options.page - 1) * size, size), pages
    end = len(ranked) - (options.page - 1) * size  # the newest page has the newest samples, the oldest of them first
    return ranked.slice(max(0, end - size), min(size, end)), pages


def _reader(config: RunConfig | None) -> SampleReader:
    """The reader for the run's model. If its directory is missing on this machine, tokens are shown as ids."""
    try:
        return SampleReader(model_directory(config.model) if config else Path())
    except ConfigError:
        return SampleReader(Path())


def _syntax(config: RunConfig | None, sample: ReadSample) -> ToolCallSyntax:
    return syntax_of(config, sample["eval_set"], sample["task"])


def as_json(sample: ReadSample, reader: SampleReader, syntax: ToolCallSyntax = "tagged") -> dict[str, Any]:
    """A sample as plain values: its columns, the ledger's record of its position, and its conversation.

    A turn with tool calls has `calls`. A turn whose times were recorded has `times`.
    """
    ledger = {"step": sample.step, "lag": sample.lag, "settled": sample.outcome or None}
    turns = []
    for turn in turns_of(sample, reader, syntax):
        more = ({"calls": turn.calls} if turn.calls else {}) | ({"times": turn.times} if turn.times else {})
        turns.append({"row": turn.row, "role": turn.role, "text": turn.text, **more})
    return dict(sample.values) | ledger | {"conversation": turns}
