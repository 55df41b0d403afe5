"""Take pictures of the dashboard in a real browser: `python bench/look_at_dashboard.py [RUN] [--out FOLDER]`.

Without RUN it plants one behind a real control socket. Needs Chromium (Debian: `apt-get install chromium`) and
playwright (`pip install playwright`). Writes every page in light and dark, and some narrow; looking is up to you.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser import BROWSERS, QUIET, find_browser
from planted_control import plant_seat, serving

from myxa.launch.tui.feed import Feed
from myxa.launch.web.dashboard import Dashboard, DashboardGuard

PAGES = ("overview", "learning", "speed", "time", "knobs", "events", "samples")


async def take(url: str, out: Path, browser: str) -> None:
    from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports]

    async with async_playwright() as driver:
        with tempfile.TemporaryDirectory() as profile:
            for scheme in ("light", "dark"):
                context = await driver.chromium.launch_persistent_context(
                    f"{profile}/{scheme}", executable_path=browser, args=list(QUIET), headless=True,
                    color_scheme=scheme, viewport={"width": 1400, "height": 900},
                )  # fmt: skip
                await _pictures(context, url, out, scheme)
                await context.close()


async def _pictures(context: Any, url: str, out: Path, scheme: str) -> None:
    page = context.pages[0]
    page.on("console", lambda message: print(f"console: {message.text}"))
    page.on("pageerror", lambda error: print(f"error: {error}"))
    await page.goto(url)
    await page.wait_for_selector("#link.on")
    for name in PAGES:
        await page.goto(f"{url.partition('?')[0]}#{name}")
        await page.wait_for_timeout(1500)
        await page.screenshot(path=out / f"{scheme}-{name}.png", full_page=True)
        print(out / f"{scheme}-{name}.png")
    if scheme == "light":
        for colour in ("gap", "version"):
            await page.click(f'[data-colour="{colour}"]')
            await page.screenshot(path=out / f"light-samples-{colour}.png", full_page=True)
        await page.goto(f"{url.partition('?')[0]}#knobs")
        if await page.query_selector('[aria-label="turn lr"]'):
            await page.click('[aria-label="turn lr"]')
            await page.screenshot(path=out / "light-turn.png")
            await page.click("#turn-cancel")
        await page.set_viewport_size({"width": 480, "height": 900})
        for name in ("overview", "knobs", "samples"):
            await page.goto(f"{url.partition('?')[0]}#{name}")
            await page.wait_for_timeout(800)
            await page.screenshot(path=out / f"narrow-{name}.png", full_page=True)


async def look(options: argparse.Namespace, browser: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if options.run is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            note = await stack.enter_async_context(serving(plant_seat(Path(folder))))
            feed = Feed.of(Path(note.run_dir))
        elif (options.run / "control.json").is_file():
            feed = Feed.of(options.run)
        else:
            feed = Feed.of_files(options.run)
        url = await stack.enter_async_context(Dashboard(feed, DashboardGuard(may_operate=True)).serving(0))
        await take(url, options.out, browser)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "myxa-dashboard")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(look(options, browser))
    return 0


if __name__ == "__main__":
    sys.exit(main())
