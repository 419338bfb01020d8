"""A real browser that opens a page and does what a reader does: Chromium without a window, over its DevTools protocol.

    async with open_page(file) as page:
        await page.run("document.title")

A machine without Chromium skips the test. `problems` has the page's errors, and what its policy forbade.
"""

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import WAIT_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")


class BrowserPage:
    """An open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=WAIT_SECONDS)
            if message.get("id") == number:
                return dict(message.get("result") or message)
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])

    async def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def type(self, name: str, value: str) -> None:
        """Write into the control with this name."""
        found = f"document.querySelector('[name={name}]')"
        await self.run(f"{found}.value = {value!r}; {found}.dispatchEvent(new Event('input')); 0")


@asynccontextmanager
async def open_page(file: Path, anchor: str = "") -> AsyncIterator[BrowserPage]:
    """The page of a file, loaded; the browser ends with the block."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program, *SWITCHES, f"--user-data-dir={folder}", "about:blank"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            port = await _port(Path(folder, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as http, _connected(http, port) as page:
                for domain in ("Runtime", "Log", "Page"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=f"{file.as_uri()}{anchor}")
                await _loaded(page)
                yield page
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(WAIT_SECONDS)


async def _port(file: Path) -> int:
    async with asyncio.timeout(WAIT_SECONDS):
        while not (file.exists() and file.read_text().strip()):
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])


@asynccontextmanager
async def _connected(http: aiohttp.ClientSession, port: int) -> AsyncIterator[BrowserPage]:
    async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
        (target, *_) = [entry for entry in await response.json() if entry["type"] == "page"]
    async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
        yield BrowserPage(socket)


async def _loaded(page: BrowserPage) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while await page.run("location.protocol + document.readyState") != "file:complete":
            await asyncio.sleep(0.05)
