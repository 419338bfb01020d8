"""Text from outside reaches a terminal as text."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

from pipeline.rollout.sample_store import SampleStore, records_of_group
from pipeline.run.first_failure import FirstFailure
from pipeline.transport.sample_records import Group, PreparedGroup
from pipeline.utils import shared_files
from pipeline.utils.terminal import clean_output, console, escape_controls
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b]52;c;cm0gLXJmIH4K\x07\x1b]0;title\x07\x1b[2J\x9b2J\x7fhuman\u00a0text\x08"
STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""What rich writes by itself: colours, and the cursor's moves of a live display."""


def controls_in(written: str) -> set[str]:
    return {each for each in written if not each.isprintable()} - set("\n\t\r\u00a0")


def test_what_is_printed_in_a_launcher_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with clean_output():
        print(f"failed: {HOSTILE}", flush=True)
        sys.stdout.writelines([HOSTILE])
        print(HOSTILE, file=sys.stderr)
    for written in capsys.readouterr():
        assert "human\u00a0text" in written
        assert controls_in(written) == set()


def test_a_console_obeys_its_own_styles_alone() -> None:
    file = io.StringIO()
    screen = console(file=file, force_terminal=True, width=80)
    table = Table("name", HOSTILE)
    table.add_row(Text(HOSTILE, "red"), HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE, "bold"), Panel(HOSTILE, title=Text(HOSTILE)), table):
        screen.print(shown)
    with Live(console=screen, auto_refresh=False) as live:
        live.update(Panel(Text(HOSTILE)), refresh=True)
        print(HOSTILE)
    written = file.getvalue()
    assert "\x1b[31m" in written, "colours are still there"
    assert written.count("human\u00a0text") >= 7
    assert controls_in(STYLES.sub("", written)) == set()
    assert "\x1b[2J" not in written


def test_rich_draws_past_the_stream_of_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with clean_output():
        screen = console(force_terminal=True, width=80)
        with Live(console=screen, auto_refresh=False) as live:
            live.update(Text("drawn", "red"), refresh=True)
        assert list(track([1], "counted", console=console(force_terminal=True, width=80))) == [1]
    written = capsys.readouterr().out
    assert "\x1b[31mdrawn" in written
    assert "counted" in written
    assert "␛" not in written


def test_nothing_is_hidden_in_text_that_is_to_be_read() -> None:
    assert escape_controls("a\tb\nc\x1b[0m\x00\u202e\x9b") == "a\tb\nc␛[0m␀\\u202e\\u009b"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A run whose agent said `HOSTILE` when it failed, with a sample that failed for it."""
    run = FakeRun(tmp_path / "demo", make_config(name="demo"))
    attempt = run.attempt("local1-0")
    attempt.meet()
    attempt.all_roles("starting", "failed")
    cause = f"agent failed: {HOSTILE}"
    failure = FirstFailure(role="actor.0", rank=0, cause=cause, exit_code=1, time=run.now, log="")
    shared_files.write_document(attempt.paths.first_failure, failure)
    run.submit("local1", "local")
    group = Group(position=0, prompt=0, samples=(), failures=(cause,))
    with SampleStore(run.paths.rollouts / "train", "local1-0", 1 << 24) as kept:
        kept.add(records_of_group(PreparedGroup(group=group, outcome="failed: agent failed"), "agent", "group"))
    return run


@pytest.mark.parametrize("colours", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}])
@pytest.mark.parametrize("launcher", ["watch.py run={}", "runs.py output={0}/..", "samples.py run={}"])
def test_a_failure_commands_no_terminal(launcher: str, colours: dict[str, str], run: FakeRun) -> None:
    script, argument = launcher.format(run.root).split()
    command = [sys.executable, str(ROOT / "launchers" / script), argument]
    environment = {**os.environ, "COLUMNS": "400", **colours}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    written = done.stdout + done.stderr
    assert "human" in written, written
    assert controls_in(STYLES.sub("", written)) == set()
    assert "\x1b]" not in written


def test_no_other_console_is_made() -> None:
    without = re.compile(r"\bConsole\(|\btrack\((?![^:]*console=)")
    rooms = (file for room in ("pipeline", "slurm", "launchers") for file in (ROOT / room).rglob("*.py"))
    made = [file.name for file in rooms if "from rich" in (text := file.read_text()) and without.search(text)]
    assert made == ["terminal.py"]
