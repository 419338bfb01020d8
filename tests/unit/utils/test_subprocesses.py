"""Children, their groups and held ports."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.utils import subprocesses
from pipeline.utils.listeners import listen_on_held
from pipeline.utils.waiting import wait_for
from tests.support.processes import gone

ENV = dict(os.environ)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "role.log"


@pytest.fixture
def started() -> Iterator[list[subprocesses.Child]]:
    children: list[subprocesses.Child] = []
    yield children
    for child in children:
        child.kill()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def first_line(log: Path) -> str:
    return wait_for("the child's first line", lambda: next(iter(log.read_text().splitlines()), None), 20)


def test_a_child_that_ends_reports_its_exit_code(log: Path) -> None:
    child = subprocesses.Child(python("raise SystemExit(7)"), log, ENV)
    assert wait_for("its end", lambda: child.poll() is not None, 20)
    assert child.poll() == 7


def test_stop_ends_a_child_that_ignores_the_request(log: Path, started: list[subprocesses.Child]) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    child = subprocesses.Child(python(code), log, ENV)
    started.append(child)
    first_line(log)
    assert child.stop(0.2) == -9
    assert subprocesses.describe_exit(-9) == "killed by SIGKILL"


def test_a_child_that_the_kernel_does_not_end_counts_as_killed_and_ends_nobodys_loop(
    log: Path, started: list[subprocesses.Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocesses.Child(["sleep", "600"], log, ENV)
    started.append(child)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda pid, number: None)
        assert child.kill(0.05) == -signal.SIGKILL
        assert child.poll() is None
    assert child.kill() == -signal.SIGKILL


def test_what_a_dead_leader_left_in_its_group_is_ended(log: Path, started: list[subprocesses.Child]) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    child = subprocesses.Child(python(code), log, ENV)
    started.append(child)
    grandchild = int(first_line(log))
    assert wait_for("the leader's end", lambda: child.poll() is not None, 20)
    assert wait_for("the grandchild's end", lambda: gone(grandchild), 5)


def test_a_child_dies_with_its_agent(log: Path, started: list[subprocesses.Child]) -> None:
    agent = (
        "import os, sys, time; from pathlib import Path; from pipeline.utils import subprocesses as process;"
        f"child = process.Child(['sleep', '600'], Path({str(log)!r}), dict(os.environ));"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    out = log.with_name("agent.log")
    parent = subprocesses.Child(python(agent), out, ENV)
    started.append(parent)
    pid = int(first_line(out))
    parent.kill()
    assert wait_for("the role's end", lambda: gone(pid), 5)


SHIELDED = ("SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2")
MASK = "import signal; print(*sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


def test_a_role_and_what_it_starts_have_the_schedulers_signals_blocked(
    log: Path, started: list[subprocesses.Child]
) -> None:
    deeper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MASK!r}], start_new_session=True)"
    started.append(subprocesses.Child(python(f"{MASK}; print('', end='', flush=True); {deeper}"), log, ENV))
    wait_for("both to tell their mask", lambda: len(log.read_text().splitlines()) == 2, 20)
    assert [tuple(line.split()) for line in log.read_text().splitlines()] == [SHIELDED, SHIELDED]


def test_a_signal_of_the_scheduler_before_the_role_is_itself_does_not_end_it(
    log: Path, started: list[subprocesses.Child]
) -> None:
    child = subprocesses.Child(python("print('up', flush=True); import time; time.sleep(600)"), log, ENV)
    started.append(child)
    for name in SHIELDED:
        os.killpg(child.pid, signal.Signals[name])
    assert first_line(log) == "up"
    assert child.poll() is None


def test_a_signal_that_came_before_the_resource_tracker_does_not_end_the_role(
    log: Path, started: list[subprocesses.Child]
) -> None:
    code = f"""
import os, signal
from pipeline.utils.subprocesses import start_resource_tracker
os.kill(os.getpid(), signal.SIGTERM)
start_resource_tracker()
print("goes on", flush=True)
{MASK}
"""
    started.append(subprocesses.Child(python(code), log, ENV))
    wait_for("its end", lambda: started[-1].poll() is not None, 20)
    assert log.read_text().splitlines() == ["goes on", " ".join(SHIELDED)]


def test_the_agent_itself_hears_the_signals_that_its_roles_do_not(log: Path, started: list[subprocesses.Child]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    started.append(subprocesses.Child(["sleep", "600"], log, ENV))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_role_can_be_asked_to_end_although_its_agent_ignores_that(
    log: Path, started: list[subprocesses.Child]
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocesses.Child(["sh", "-c", "echo up; exec sleep 600"], log, ENV)
    finally:
        signal.signal(signal.SIGINT, before)
    started.append(child)
    first_line(log)
    assert child.stop(10) == -signal.SIGINT


def test_descendants_in_other_sessions_are_found_and_ended(log: Path, started: list[subprocesses.Child]) -> None:
    inner = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, start_new_session=True).pid)"
    agent = (
        "import subprocess, sys; from pipeline.utils import subprocesses as process; process.adopt_orphans();"
        f"pid = int(subprocess.run([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE).stdout);"
        "print(pid in process.end_descendants(), pid, flush=True)"
    )
    started.append(subprocesses.Child(python(agent), log, ENV))
    found, pid = first_line(log).split()
    assert found == "True"
    assert gone(int(pid))


@pytest.mark.parametrize("address", ["127.0.0.2", ""])
def test_a_held_port_is_refused_to_strangers_and_serves_its_own_child(address: str) -> None:
    with subprocesses.hold_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.3", port))
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.3", port))  # it sets SO_REUSEADDR
        with listen_on_held(address, port), socket.create_connection(("127.0.0.2", port)) as client:
            assert client.getpeername()[1] == port


TAKE = """
import socket, sys
for options in ((socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    with socket.socket() as taken:
        for option in options: taken.setsockopt(socket.SOL_SOCKET, option, 1)
        try: taken.bind(("127.0.0.3", int(sys.argv[1]))); taken.listen(); print("took it with", options)
        except OSError as error: pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_listen_on_a_held_port_whatever_he_sets() -> None:
    with subprocesses.hold_port() as holder:
        port = holder.getsockname()[1]
        another = {"user": 65534, "group": 65534, "extra_groups": ()}
        take = [sys.executable, "-I", "-S", "-c", TAKE, str(port)]
        assert subprocess.run(take, capture_output=True, text=True, timeout=60, check=True, **another).stdout == ""
        with listen_on_held("127.0.0.2", port):
            assert subprocess.run(take, capture_output=True, text=True, timeout=60, check=True, **another).stdout == ""


def test_a_port_that_is_taken_on_any_address_is_not_held() -> None:
    with socket.create_server(("127.0.0.9", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"), socket.socket() as holder:
            holder.bind(("", taken))


def test_the_tail_of_a_log_is_its_last_lines(log: Path) -> None:
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert subprocesses.tail(log, 2) == ["line 98", "line 99"]
    assert subprocesses.tail(log.with_name("none.log")) == []


ABANDONED_GROUP = """
import datetime, threading, time
import torch.distributed as dist
from pipeline.utils import subprocesses as process
from pipeline.utils.listeners import listen_on_held

def work():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = datetime.timedelta(seconds=1.05)
    threading.Thread(target=lambda: dist.ProcessGroupGloo(store, 0, 2, patience), daemon=True).start()
    time.sleep(1)
    print("all is written")

process.exit_after(work)  # without it, most tries end in SIGABRT
"""
"""A process that ends while a thread of it still waits for the peer of a gloo group."""
FAILED_WORK = """
import threading, time
import torch
from pipeline.utils import subprocesses as process
from pipeline.utils.listeners import listen_on_held

def work():
    memory = torch.empty(200_000_000, dtype=torch.uint8)

    def fill():
        while True:
            memory.zero_()

    threading.Thread(target=fill, daemon=True).start()
    time.sleep(0.5)
    raise ValueError("no such model")

process.exit_after(work)  # without it, most tries end in SIGABRT
"""
"""A process that fails while a thread of it is inside of torch."""


def test_a_role_that_did_its_work_is_not_aborted_by_a_thread_that_still_waits() -> None:
    command = [sys.executable, "-c", ABANDONED_GROUP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "all is written\n"), done.stderr


def test_a_role_that_failed_says_why_and_is_not_aborted_by_a_thread_that_still_computes() -> None:
    command = [sys.executable, "-c", FAILED_WORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ValueError: no such model\n")
