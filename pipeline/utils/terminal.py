"""Printing of untrusted text: control characters are shown, never executed.

Samples, failures, rows of a dataset and names of metrics may hold escape sequences, which set a terminal's title, clear
it, or write to the clipboard (OSC 52). Of the control characters that a launcher prints, only line ends, tabs and
carriage returns (of progress bars) reach the terminal. Exception: the sequences with which rich draws our own output.

    with clean_output():                 # a launcher, once
        print(failure)
    console().print(Text(failure))       # instead of rich's Console()
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
    """The text with visible substitutes for unprintable characters, except line ends and tabs.

    A control character below U+0020 becomes Unicode's picture of it (`␛`), any other one its number (`\\u009b`).
    """
    return "".join(char if char.isprintable() or char in "\n\t" else _picture(char) for char in text)


def _picture(character: str) -> str:
    number = ord(character)
    return chr(0x2400 + number) if number < 0x20 else f"\\u{number:04x}"


class CleanStream:
    """A text stream that writes control characters as `escape_controls` does; all else is delegated to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream that rich's consoles write to directly: `console` cleans its text itself."""

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
    """Redirect both standard streams through a `CleanStream` for the duration of the block."""
    output, errors = CleanStream(sys.stdout), CleanStream(sys.stderr)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        yield


class _CleanConsole(Console):
    """A console that removes control characters from text. Rich gave them no width, so the layout is unchanged."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_REMOVED), segment.style)


def console(**settings: Any) -> Console:
    """A rich console, with these settings, for untrusted text.

    It writes to the stream below a `CleanStream`, also while a live display has put another stream in between.
    """
    return _CleanConsole(**{"file": getattr(sys.stdout, "rich_proxied_file", None), **settings})
