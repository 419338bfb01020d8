"""The front as a child of the launcher, for as long as the launcher serves.

Owns its process: started, watched, started again; and its port, which is held while no front listens there, so that no
other user can (decision 0032). Promises that a front which ends, or gives no answer for `UNRESPONSIVE_SECONDS`, is
replaced by another at the same address, as often as it takes, while clients wait; and that none is left when `stop`
returns. Must not know what a front does.

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
from slurm.scheduler.slurm.slurm_environment import child_environment

FRONT_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 10.0
UNRESPONSIVE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A front that served for so long is started again at once when it ends, and not after a growing pause."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class GatewaySupervisor:
    """The front of a run.

    It is started and stopped in one thread, since the kernel ends it with the thread that started it."""

    def __init__(self, settings: Settings, log: Path, deaf_seconds: float = UNRESPONSIVE_SECONDS) -> None:
        self._settings, self._log, self._deaf_seconds = settings, log, deaf_seconds
        self._held = ExitStack()
        self._ending, self._started = threading.Event(), threading.Event()
        self._address: Address | None = None
        self._error: ConfigError | None = None
        self._thread = threading.Thread(target=self._keep, name="front", daemon=True)

    def start(self) -> Address:
        """Where it listens; `ConfigError` if it cannot start."""
        port, self._held = _hold_port(self._settings)
        self._settings = msgspec.structs.replace(self._settings, port=port, held=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._address is not None
        return self._address

    def stop(self) -> None:
        """End the front, watch it no more, and give its port back."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._held.close()

    def _keep(self) -> None:
        try:
            self._serve(first=True)
        except ConfigError as error:
            self._error = error
            return
        finally:
            self._started.set()
        pauses = exponential_pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._ending.wait(next(pauses)):
            steady = Deadline("a steady front", STEADY_SECONDS)
            try:
                self._serve(first=False)
            except ConfigError as error:
                print(f"the front does not start, which is tried again: {error}", file=sys.stderr, flush=True)
            if steady.passed:
                pauses = exponential_pauses(_FIRST_PAUSE, _LONGEST_PAUSE)

    def _serve(self, *, first: bool) -> None:
        """One front, from its start to its end."""
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
                print(f"the front serves again at {self._address.url}", file=sys.stderr, flush=True)
            self._watch(child, self._address.url)
        finally:
            child.stop(STOP_SECONDS)

    def _await_address(self, child: subprocesses.Child) -> Address:
        settings, deadline = self._settings, Deadline("the front to listen", FRONT_SECONDS)
        where = f"{settings.host}:{settings.port}"
        while not (self._ending.wait(0.05) or deadline.passed):
            if (code := child.poll()) is not None:
                why = " ".join(subprocesses.tail(child.log, 1)) or subprocesses.describe_exit(code)
                raise ConfigError("serve", where, "a front that starts", why)
            address = shared_files.read_document(settings.address, Address)
            if address is not None and address.pid == child.pid:
                return address
        raise ConfigError("serve", where, f"a front that listens within {FRONT_SECONDS:.0f} s", f"see {child.log}")

    def _watch(self, child: subprocesses.Child, url: str) -> None:
        """Until it has ended, or is deaf."""
        hearing = Deadline("an answer of the front", self._deaf_seconds)
        while not self._ending.wait(1.0):
            if (code := child.poll()) is not None:
                print(
                    f"the front ended ({subprocesses.describe_exit(code)}); another one starts",
                    file=sys.stderr,
                    flush=True,
                )
                return
            if _answers(url, min(ANSWER_SECONDS, self._deaf_seconds)):
                hearing = Deadline("an answer of the front", self._deaf_seconds)
            elif hearing.passed:
                print(f"the front gave no answer for {self._deaf_seconds:.0f} s; another one starts", file=sys.stderr)
                child.kill()
                return


def _hold_port(settings: Settings) -> tuple[int, ExitStack]:
    """The configured port; or that of an earlier front, or any that is free. It is held until the stack closes."""
    if settings.port:
        try:
            return hold_address(settings.host, settings.port)
        except OSError as error:
            where, why = (
                f"{settings.host}:{settings.port}",
                f"{error.strerror or error}, {listening_process(settings.port)}",
            )
            raise ConfigError("serve.port", where, "an address that is free", why) from None
    known = shared_files.read_document(settings.address, Address)
    if known is not None and (port := urlsplit(known.url).port):
        with suppress(OSError):
            return hold_address(settings.host, port)
    return hold_address(settings.host, 0)


def _answers(url: str, seconds: float) -> bool:
    """Whether a front answers anything at all."""
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        link.request("GET", "/api/v1/healthz")
        return link.getresponse().status > 0
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()
