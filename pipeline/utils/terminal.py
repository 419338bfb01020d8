"""Text from outside in a terminal: shown, never obeyed.

Samples, failures, rows of a dataset and names of metrics may hold escape sequences, which set a terminal's title, clear
it, or write to the clipboard (OSC 52). Owns what becomes of them. Promises that no control character but line ends,
tabs and carriage returns (of progress bars) reaches the terminal from what a launcher prints. rich's own sequences,
which draw what is ours, do.

    with clean_output():                 # a launcher, once
        print(failure)
    console().print(Text(failure))       # in the place of rich's Console()
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_HARMLESS = "\n\t\r"
_CONTROLS = [number for number in (*range(0x20), *range(0x7F, 0xA0)) if chr(number) not in _HARMLESS]
_SHOWN = {number: chr(0x2400 + number) if number < 0x20 else f"\\u{number:04x}" for number in _CONTROLS}
_REMOVED = dict.fromkeys(_CONTROLS)


def escape_controls(text: str) -> str:
    """Text in which nothing is hidden: what cannot be printed, but line ends and tabs, as Unicode's pictures of control
    characters, and what has no picture as its number."""
    return "".join(each if each.isprintable() or each in "\n\t" else _picture(each) for each in text)


def _picture(character: str) -> str:
    number = ord(character)
    return chr(0x2400 + number) if number < 0x20 else f"\\u{number:04x}"


class CleanStream:
    """A text stream that shows control characters as `escape_controls` does; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """What rich's consoles write to, past this one: they clean their texts themselves (`console`)."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(text.translate(_SHOWN))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def clean_output() -> Iterator[None]:
    """What is printed in the block, to both standard streams, goes through a `CleanStream`."""
    output, errors = CleanStream(sys.stdout), CleanStream(sys.stderr)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        yield


class _CleanConsole(Console):
    """Leaves control characters out of every text, which had no width when it was laid out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_REMOVED), segment.style)


def console(**settings: Any) -> Console:
    """A rich console, with these settings, for text from outside.

    It writes to the stream below a `CleanStream`, also while a live display has put a stream of its own in between.
    """
    return _CleanConsole(**{"file": getattr(sys.stdout, "rich_proxied_file", None), **settings})
