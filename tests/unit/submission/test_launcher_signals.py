"""`slurm.submission.launcher_signals`: what a launcher makes of the signals that ask it to end."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.submission.launcher_signals import INTERRUPTED, SIGNALS, exit_code, recorded_signals
from tests.patience import WAIT_SECONDS

CLOSED = """
import os, sys, time
from slurm.submission.launcher_signals import exit_code, recorded_signals
os.open(sys.argv[1], os.O_RDWR)  # the terminal of this session from now on, which sends HUP when it is closed
with recorded_signals() as received:
    print("here", flush=True)
    while not received:
        time.sleep(0.01)
    print("coming down", flush=True)
    print("in order", file=sys.stderr, flush=True)
sys.exit(exit_code(received[0]))
"""


@pytest.fixture(autouse=True)
def plain_handlers() -> Iterator[None]:
    """Python's own handlers, whatever a shell or an earlier test left."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_that_means_the_end_is_noted_and_has_its_code(number: signal.Signals) -> None:
    with recorded_signals() as received:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [number, signal.SIGTERM]
    assert exit_code(number) == 128 + number
    assert exit_code(number) in INTERRUPTED
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_hang_up_that_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with recorded_signals() as received:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_launcher_whose_terminal_is_closed_comes_down_in_order() -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", CLOSED, os.ttyname(slave)]
    with subprocess.Popen(command, stdout=slave, stderr=slave, start_new_session=True) as launcher:
        try:
            os.close(slave)
            assert b"here" in os.read(master, 100)
            os.close(master)
            assert launcher.wait(WAIT_SECONDS) == 128 + signal.SIGHUP
        finally:
            launcher.kill()


def test_a_hang_up_takes_nothing_from_a_file(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom slurm.submission.launcher_signals import recorded_signals\n"
        "with recorded_signals():\n    os.kill(os.getpid(), signal.SIGHUP)\n    print('still told', flush=True)"
    )
    with (tmp_path / "said").open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file, timeout=WAIT_SECONDS, check=False)
    assert (tmp_path / "said").read_text() == "still told\n"
