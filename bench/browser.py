"""A real browser, driven over its DevTools socket: for tests of pages, and for pictures of them.

playwright was considered: it downloads browsers of its own; an installed Chromium (Debian: `apt-get install chromium`)
and aiohttp suffice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
         "--remote-debugging-port=0", "--remote-allow-origins=*")  # fmt: skip
PATIENCE_S = 40.0


def find_browser() -> str | None:
    """Path of the first that is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, link: aiohttp.ClientWebSocketResponse) -> None:
        self.wrong: list[str] = []
        """Errors of scripts, and what the content policy stopped."""
        self.asked: list[str] = []
        """URLs that the page asked for."""
        self._link = link
        self._num = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def listen(self) -> None:
        """Until the tab is closed."""
        async for message in self._link:
            told = json.loads(message.data)
            if (future := self._waiting.pop(told.get("id", 0), None)) is not None and not future.done():
                future.set_result(told)
            params = told.get("params", {})
            if told.get("method") == "Runtime.exceptionThrown":
                self.wrong.append(json.dumps(params["exceptionDetails"])[:600])
            elif told.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.wrong.append(params["entry"]["text"])
            elif told.get("method") == "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    async def do(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol."""
        self._num += 1
        future = self._waiting[self._num] = asyncio.get_running_loop().create_future()
        await self._link.send_json({"id": self._num, "method": method, "params": params})
        told = await asyncio.wait_for(future, PATIENCE_S)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def goto(self, url: str) -> None:
        """Open a page."""
        await self.do("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'", "the page")

    async def until(self, script: str, what: str = "") -> None:
        """Wait until an expression is true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not await self.run(f"Boolean({script})"):
                    await asyncio.sleep(0.05)
                return
        seen = await self.run("document.body.innerText")
        raise AssertionError(f"{what or script} was not seen; the page says:\n{seen[:3000]}\n{self.wrong}")

    async def says(self, selector: str, words: str) -> None:
        """Wait until an element that is shown holds these words."""
        quoted = (
            f"{json.dumps(selector)})].some((e) => e.checkVisibility() && e.textContent.includes({json.dumps(words)})"
        )
        await self.until(f"[...document.querySelectorAll({quoted})", f"{words!r} in {selector}")

    async def click(self, selector: str) -> None:
        """Click the first of them."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()", selector)
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector: str, value: str, then: str = "input") -> None:
        """Type a value."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.run(
            f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('{then}', {{bubbles: true}}))"
        )

    async def count(self, selector: str) -> int:
        """How many there are."""
        return await self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    async def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Of the window, and the colours that the reader prefers."""
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path, max_height: int = 6000) -> None:
        """Of the whole page."""
        width, height = await self.run("[innerWidth, document.documentElement.scrollHeight]")
        await self.do("Emulation.setDeviceMetricsOverride", width=width, height=min(height, max_height),
                      deviceScaleFactor=1, mobile=False)  # fmt: skip
        await asyncio.sleep(0.7)
        told = await self.do("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.contextmanager
def running_browser(browser: str) -> Iterator[str]:
    """The address of a fresh one."""
    profile = Path(tempfile.mkdtemp(prefix="browser-"))
    process = subprocess.Popen(
        [browser, *QUIET, f"--user-data-dir={profile}", "about:blank"], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(profile)},
    )  # fmt: skip
    try:
        port_file, until_s = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{browser} does not listen after {PATIENCE_S:g} s")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(100):  # its children end a little later, and still write
            shutil.rmtree(profile, ignore_errors=True)
            if not profile.exists():
                break
            time.sleep(0.05)


@contextlib.asynccontextmanager
async def opened_tab(address: str) -> AsyncIterator[Page]:
    """A new one of a running browser."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            tab = await answer.json(content_type=None)
        async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28) as link:
            page = Page(link)
            listening = asyncio.create_task(page.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.do(f"{domain}.enable")
            await page.size(1440, 900)
            yield page
            listening.cancel()
        async with session.get(f"{address}/json/close/{tab['id']}"):
            """Nothing of it runs beside the next."""
