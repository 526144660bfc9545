"""A headless Chromium and one of its pages, spoken to by the DevTools protocol over one websocket.

Owns: the browser's process, its throw-away profile, and what the page complained of.
Refuses to know: which page is looked at.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S, CALL_S, STOP_S = 30.0, 20.0, 10.0


class Page:
    """One tab. `complaints`: errors and warnings of its console, uncaught exceptions, refused or failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self._reader = asyncio.create_task(self._read())

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """The size of the window, and the person's taste."""
        mobile = width < 500
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression; a promise is awaited."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Waits until an expression is truthy; returns its value."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.value(expression)):
            assert asyncio.get_running_loop().time() < deadline, f"{expression} is {value!r} after {timeout_s} s"
            await asyncio.sleep(0.05)
        return value

    async def picture(self, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of what the window shows."""
        taken = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(CALL_S):
            return await answer

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                answer = self._calls.pop(message["id"])
                if answer.cancelled():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {details['exceptionDetails']}")
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {details['args']}")
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{details['entry']['source']}: {details['entry']['text']}")
        elif event == "Network.responseReceived" and details["response"]["status"] >= 400:
            self.complaints.append(f"{details['response']['status']} from {details['response']['url']}")


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A page of a browser of its own. Raises FileNotFoundError if none is installed."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *_command(binary, profile), stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            address = await _address(process)
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                await page.attach()
                yield page
                await page.close()
        finally:
            await _end(process)


def _command(binary: str, profile: str) -> list[str]:
    options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
    options += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # it refuses to build its sandbox for root, as in a container
    return [binary, *options, "about:blank"]


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where it listens, as it says on standard error; the rest of that is read on and thrown away."""
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(START_S):
        while line := await process.stderr.readline():
            said += line
            if b"DevTools listening on " in line:
                process.drain = asyncio.create_task(process.stderr.read())  # type: ignore[attr-defined]
                return line.rpartition(b" ")[2].decode().strip()
    raise RuntimeError(f"the browser did not start: {said.decode(errors='replace')}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """It and its children, which are in a session of their own."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
