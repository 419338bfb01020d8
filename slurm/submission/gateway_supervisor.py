"""Supervision of the gateway, a child process of the serving launcher.

Owns the gateway's process, which it starts, monitors and restarts, and the gateway's port. The port stays bound while
no gateway listens, so that no other user can take it (decision 0032). Promises that a gateway which exits, or does not
answer for `UNRESPONSIVE_SECONDS`, is replaced at the same address without a limit on restarts, while clients wait; and
that no gateway runs after `stop` returns. Must not know the gateway's protocol.

    keeper = GatewaySupervisor(settings, log)
    address = keeper.start()         # `ConfigError` if it cannot start
    keeper.stop()
"""

import http.client
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pipeline.errors import ConfigError
from pipeline.tinker.gateway_settings import Address, Settings
from pipeline.utils import shared_files, subprocesses
from pipeline.utils.listeners import hold_address, listening_process
from pipeline.utils.waiting import Deadline, exponential_pauses
from slurm.scheduler.scheduler_registry import child_environment

START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 10.0
UNRESPONSIVE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A gateway that served for this long is restarted at once when it exits; otherwise the pauses grow."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class GatewaySupervisor:
    """The gateway of a run, with its process and port.

    One thread starts and stops the process, since the kernel kills a child when the thread that started it ends.
    """

    def __init__(self, settings: Settings, log: Path, unresponsive_seconds: float = UNRESPONSIVE_SECONDS) -> None:
        self._settings, self._log, self._unresponsive_seconds = settings, log, unresponsive_seconds
        self._held = ExitStack()
        self._ending, self._started = threading.Event(), threading.Event()
        self._address: Address | None = None
        self._error: ConfigError | None = None
        self._thread = threading.Thread(target=self._supervise, name="gateway", daemon=True)

    def start(self) -> Address:
        """Start the gateway. Returns the address where it listens; `ConfigError` if it cannot start."""
        port, self._held = _hold_port(self._settings)
        self._settings = msgspec.structs.replace(self._settings, port=port, held=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._address is not None
        return self._address

    def stop(self) -> None:
        """Stop the gateway and its monitoring, and release its port."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._held.close()

    def _supervise(self) -> None:
        try:
            self._serve(first=True)
        except ConfigError as error:
            self._error = error
            return
        finally:
            self._started.set()
        pauses = exponential_pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._ending.wait(next(pauses)):
            steady = Deadline("a steady gateway", STEADY_SECONDS)
            try:
                self._serve(first=False)
            except ConfigError as error:
                print(f"the gateway failed to start and is tried again: {error}", file=sys.stderr, flush=True)
            if steady.passed:
                pauses = exponential_pauses(_FIRST_PAUSE, _LONGEST_PAUSE)

    def _serve(self, *, first: bool) -> None:
        """Run one gateway process from its start to its exit."""
        command = [
            sys.executable,
            "-m",
            "pipeline.tinker.gateway_process",
            msgspec.json.encode(self._settings).decode(),
        ]
        child = subprocesses.Child(command, self._log, child_environment({}))
        try:
            self._address = self._await_address(child)
            if first:
                self._started.set()
            else:
                print(f"the gateway serves again at {self._address.url}", file=sys.stderr, flush=True)
            self._watch(child, self._address.url)
        finally:
            child.stop(STOP_SECONDS)

    def _await_address(self, child: subprocesses.Child) -> Address:
        settings, deadline = self._settings, Deadline("the gateway to listen", START_SECONDS)
        where = f"{settings.host}:{settings.port}"
        while not (self._ending.wait(0.05) or deadline.passed):
            if (code := child.poll()) is not None:
                why = " ".join(subprocesses.tail(child.log, 1)) or subprocesses.describe_exit(code)
                raise ConfigError("serve", where, "a gateway that starts", why)
            address = shared_files.read_document(settings.address, Address)
            if address is not None and address.pid == child.pid:
                return address
        raise ConfigError("serve", where, f"a gateway that listens within {START_SECONDS:.0f} s", f"see {child.log}")

    def _watch(self, child: subprocesses.Child, url: str) -> None:
        """Return once the gateway has exited, or was killed since it does not answer."""
        answer_deadline = Deadline("an answer of the gateway", self._unresponsive_seconds)
        while not self._ending.wait(1.0):
            if (code := child.poll()) is not None:
                print(
                    f"the gateway exited ({subprocesses.describe_exit(code)}) and is restarted",
                    file=sys.stderr,
                    flush=True,
                )
                return
            if _answers(url, min(ANSWER_SECONDS, self._unresponsive_seconds)):
                answer_deadline = Deadline("an answer of the gateway", self._unresponsive_seconds)
            elif answer_deadline.passed:
                print(
                    f"the gateway gave no answer for {self._unresponsive_seconds:.0f} s and is restarted",
                    file=sys.stderr,
                )
                child.kill()
                return


def _hold_port(settings: Settings) -> tuple[int, ExitStack]:
    """A bound port: the configured one, else an earlier gateway's, else a free one. The stack's close releases it."""
    if settings.port:
        try:
            return hold_address(settings.host, settings.port)
        except OSError as error:
            where, why = (
                f"{settings.host}:{settings.port}",
                f"{error.strerror or error}, {listening_process(settings.port)}",
            )
            raise ConfigError("serve.port", where, "a free address", why) from None
    known = shared_files.read_document(settings.address, Address)
    if known is not None and (port := urlsplit(known.url).port):
        with suppress(OSError):
            return hold_address(settings.host, port)
    return hold_address(settings.host, 0)


def _answers(url: str, seconds: float) -> bool:
    """Whether a gateway responds at `url`, with any status."""
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        link.request("GET", "/api/v1/healthz")
        return link.getresponse().status > 0
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()
