"""pdb over a socket: a process waits, stops where it was attached, and goes on after the client has left."""

import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import WAIT_SECONDS

PROGRAM = """
from pipeline.utils.remote_debugger import wait_for_pdb

def work():
    secret = 42
    wait_for_pdb(lambda text: print(text, flush=True))
    secret += 1
    print("secret", secret, flush=True)
    breakpoint()
    print("the end", flush=True)

work()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        yield process
        process.kill()


def attached(program: "subprocess.Popen[str]") -> list[str]:
    """The command that the program prints; it waits meanwhile."""
    assert program.stdout
    line = program.stdout.readline()
    assert "waits for a debugger; attach on this node: " in line
    return line.partition("node: ")[2].split()


def test_a_client_inspects_and_changes_the_frame_and_the_program_goes_on(program: "subprocess.Popen[str]") -> None:
    command = attached(program)
    client = subprocess.run(
        command, input="p secret * 100\nsecret = 7\nquit\n", capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert "4200" in client.stdout
    assert program.stdout
    assert program.stdout.readline() == "secret 8\n"
    # Its `breakpoint()` waits for the next client. One that says nothing and leaves lets the program go on too.
    assert attached(program) == command
    subprocess.run(command, input="", capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert program.stdout.read() == "the end\n"
    assert program.wait(WAIT_SECONDS) == 0


def test_a_client_that_dies_at_the_prompt_does_not_end_the_program(program: "subprocess.Popen[str]") -> None:
    path = Path(attached(program)[-1])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"break work\nnext\n")
    assert program.stdout
    assert program.stdout.readline() == "secret 43\n"
