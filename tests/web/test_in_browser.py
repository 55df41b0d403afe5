"""The dashboard in a real browser: what a person sees and clicks, and that what a model wrote stays text."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from myxa.launch.tui.feed import Feed
from myxa.launch.web.dashboard import Dashboard, DashboardGuard

PATIENCE_MS = 40_000


def browser_path(browser: ModuleType) -> str:
    found = browser.find_browser()
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(browser.BROWSERS)} is on the path")
    pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    return found


@contextlib.asynccontextmanager
async def opened(
    planting: ModuleType, seat: Any, profile: Path, *, operate: bool = False
) -> AsyncIterator[tuple[Any, str, list[str]]]:
    """A page on the dashboard of a live seat, its URL, and everything that went wrong in it."""
    browser = importlib.import_module("browser")  # bench/browser.py: `planting` has put it on the path
    path = browser_path(browser)
    from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports]

    wrong: list[str] = []
    async with planting.serving(seat) as note:
        dashboard = Dashboard(Feed.of(Path(note.run_dir), only_view=not operate), DashboardGuard(may_operate=operate))
        async with dashboard.serving(0) as url, async_playwright() as driver:
            context = await driver.chromium.launch_persistent_context(
                str(profile), executable_path=path, args=list(browser.QUIET), headless=True,
                viewport={"width": 1300, "height": 900},
            )  # fmt: skip
            try:
                page = context.pages[0]
                page.set_default_timeout(PATIENCE_MS)
                page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
                page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
                ours = url.partition("?")[0]
                page.on("request", lambda asked: None if asked.url.startswith(ours) else wrong.append(asked.url))
                await page.goto(url)
                await page.wait_for_selector("#link.on")
                yield page, url, wrong
            finally:
                await context.close()


async def says(page: Any, selector: str, words: str) -> None:
    await page.locator(selector).filter(has_text=words).first.wait_for(timeout=PATIENCE_MS)


@pytest.mark.timeout(240)
async def test_every_page_is_drawn_and_follows_the_run(planting, seat, tmp_path: Path) -> None:
    async with opened(planting, seat, tmp_path / "profile") as (page, _, wrong):
        assert "token" not in page.url, "the secret does not stay in the address bar"
        await says(page, "#why", "generation is the bottleneck")
        await says(page, "#tiles", "120")
        await says(page, "#actors", "rollout/2")
        await says(page, "#engines", "v119")
        assert await page.locator("#charts-overview svg polyline").count() >= 4
        assert await page.locator("#charts-overview .change").count() >= 3, "changes are vertical lines"
        seat.version = 121
        await says(page, "#tiles", "121")
        for name, selector, words in (
            ("learning", "#learning", "Gradient norm"),
            ("speed", "#speed", "Groups in the buffer"),
            ("time", "#time-charts", "trainer/0"),
            ("knobs", "#knob-table", "Largest lag of any trained token."),
            ("events", "#event-table", "starting -> running"),
        ):
            await page.click(f'nav a[href="#{name}"]')
            await says(page, selector, words)
            assert await page.locator(f"#{name}").is_visible()
            assert not await page.locator("#overview").is_visible()
        await page.click('nav a[href="#knobs"]')
        await says(page, "#change-table", "lr 0.0001 -> 5e-05")
        assert await page.locator("#knob-table button").count() == 0, "nothing to turn without --operate"
        await page.reload()
        await page.wait_for_selector("#link.on")
        assert wrong == []


@pytest.mark.timeout(240)
async def test_what_a_model_wrote_stays_text(planting, seat, tmp_path: Path) -> None:
    with (seat.run_dir / "events.jsonl").open("a") as file:
        file.write(
            '{"source": "<b>a</b>", "wall_s": 1700000001.0, "kind": "eval", "text": "<img src=x onerror=window.hacked=1>", "data": {}}\n'
        )
    async with opened(planting, seat, tmp_path / "profile") as (page, _, wrong):
        await page.click('nav a[href="#samples"]')
        await says(page, ".prompt", "<script>window.hacked = true</script>")
        await says(page, ".tokens", "onerror='window.hacked=true'")
        await says(page, ".prompt", "\\u202e")
        assert await page.locator(".tok.h3, .tok.h4, .tok.h2").count() > 3
        await page.click('[data-colour="gap"]')
        await says(page, "#token-key", "|trainer - engine|")
        scored = page.locator(".group", has_text="group 1002")
        assert await scored.locator(".tok.h3").count() >= 4, "tokens that differ by two nats"
        assert await page.locator(".tok.h3").count() == await scored.locator(".tok.h3").count(), (
            "others were not scored"
        )
        assert "gap -2" in (await scored.locator(".tok.h3").first.get_attribute("title") or "")
        await page.click('[data-colour="version"]')
        assert await page.locator(".tok.v4").count() > 3  # 118 and 119, of six colours
        assert await page.locator(".tok.v5").count() > 3
        await says(page, "#token-key", "v119")
        await page.click('nav a[href="#events"]')
        await says(page, "#event-table", "<img src=x onerror")
        assert await page.evaluate("window.hacked") is None
        assert await page.locator("#sample-list img, #sample-list script, #event-table img").count() == 0
        assert wrong == [], "and the content policy had nothing to stop"


@pytest.mark.timeout(240)
async def test_a_knob_is_turned_and_a_refusal_is_shown(planting, seat, tmp_path: Path) -> None:
    async with opened(planting, seat, tmp_path / "profile", operate=True) as (page, _, wrong):
        await page.click('nav a[href="#knobs"]')
        await page.click('[aria-label="turn lr"]')
        await page.fill("#turn-value", "-1")
        await page.click("#turn-set")
        await says(page, "#turn-said", "lr takes above 0")
        assert seat.values["lr"] == 1e-4
        await page.fill("#turn-value", "5e-5")
        await page.fill("#turn-reason", "noisy")
        await page.press("#turn-reason", "Enter")
        await says(page, "#knob-table .changed", "5e-05")
        assert (seat.values["lr"], seat.records[-1].reason) == (5e-5, "noisy")
        assert not await page.locator("#turn").is_visible()
        assert [line for line in wrong if "409" not in line] == []  # the browser notes the refusal's status
