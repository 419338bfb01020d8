"""Words for people, whose terminal may be gone.

Owns the one way in which a process that has work to end writes lines to a terminal. Promises that a stream which takes
nothing any more (a closed terminal, a pipe without a reader, a full disk) ends nothing.

    say("sft: step 1 of 4")
    say("error: no such file", sys.stderr)
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard output. A stream that fails leads nowhere from then on."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _lead_nowhere(stream)


def _lead_nowhere(stream: TextIO) -> None:
    """What it still holds would fail again when the interpreter ends, which would change the exit code."""
    with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
