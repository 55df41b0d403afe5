"""Dashboard, report and comparison in a real browser: what a person sees and clicks, and that what a model wrote stays
text. Without a browser these tests are skipped, and the run of tests ends with a line that says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.harness.scripts import loaded

from myxa.launch.control.client import ControlClient
from myxa.launch.views.compare import load_runs
from myxa.launch.views.report import write_page, write_report

pytestmark = pytest.mark.timeout(240)


BROWSER = loaded("bench/browser.py")


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    """The address of a fresh one."""
    found = BROWSER.find_browser()
    if found is None:
        pytest.skip(f"NO BROWSER: none of {', '.join(BROWSER.BROWSERS)} is installed, so no page was looked at")
    with BROWSER.running_browser(found) as address:
        yield address


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Any]:
    """A tab."""
    async with BROWSER.opened_tab(browser) as tab:
        yield tab


@contextlib.asynccontextmanager
async def opened(planting: ModuleType, seat: Any, page: Any, *, operate: bool = False) -> AsyncIterator[None]:
    """The dashboard of a live seat in the tab."""
    async with planting.serving(seat) as note:
        url = (await asyncio.to_thread(ControlClient(note).ask, "dashboard", operate=operate))["url"]
        await page.goto(url)
        await page.until("document.querySelector('#link.on')", "the live link")
        yield
        ours = url.partition("?")[0]
        assert [asked for asked in page.asked if not asked.startswith((ours, "about:", "data:"))] == []


async def fits(page: Any) -> None:
    """Nothing is wider than a window of 400 pixels, and no chart is empty."""
    await page.size(400, 900, is_dark=True)
    await page.until("document.documentElement.scrollWidth <= innerWidth", "a page that fits")
    await page.size(1440, 900)


async def test_every_page_is_drawn_and_follows_the_run(planting, seat, page) -> None:
    async with opened(planting, seat, page):
        assert "token" not in await page.run("location.href"), "the secret does not stay in the address bar"
        await page.says("#why", "generation is the bottleneck")
        await page.says("#tiles", "120")
        await page.says("#actors", "rollout/2")
        await page.says("#engines", "v119")
        await page.says("#rollout-time", "their time: tool 67 % \u00b7 generate 33 %")
        waits = "rollout/0, group 41.3 (row 17 of gsm.jsonl): has waited 1 min 15 s for tool <script>"
        await page.says("#rollouts li", waits)
        await page.says("#rollouts li", ", at turn 2")
        await page.until("document.querySelectorAll('#charts-overview canvas').length >= 2", "the charts in view")
        bars = "[...document.querySelectorAll('#lags .num')].reduce((sum, node) => sum + Number(node.textContent), 0)"
        await page.until(f"{bars} === 384", "the groups of all steps by lag")
        await page.fill("#lag-step", "6")
        await page.until(f"{bars} === 32", "those of one step")
        seat.version = 121
        await page.says("#tiles", "121")
        for name, selector, words in (
            ("learning", "#learning", "Gradient norm"),
            ("speed", "#speed", "Groups in the buffer"),
            ("metrics", "#metrics", "train/clip_fraction"),
            ("time", "#lanes", "trainer/0"),
            ("knobs", "#knob-table", "Largest lag of any trained token."),
            ("events", "#event-table", "starting -> running"),
            ("config", "#config", "pace"),
        ):
            await page.click(f'nav a[href="#{name}"]')
            await page.says(selector, words)
            assert not await page.run("document.querySelector('#overview').checkVisibility()")
            await fits(page)
        await page.click('nav a[href="#time"]')
        await page.until(
            "[...document.querySelectorAll('canvas.lane')].every((c) => c.width > 300)", "lanes that are painted"
        )
        await page.run(
            "document.querySelector('canvas.lane').dispatchEvent(new PointerEvent('pointermove', { clientX: innerWidth / 2 }))"
        )
        await page.says(".lanesaid", "trainer/0 after")
        await page.click('nav a[href="#knobs"]')
        await page.says("#change-table", "lr 0.0001 -> 5e-05")
        assert await page.count("#knob-table button") == 0, "nothing to turn without --operate"
        assert page.wrong == []


async def test_charts_are_filtered_smoothed_zoomed_and_compared(planting, seat, page) -> None:
    import shutil

    shutil.copytree(seat.run_dir, seat.run_dir.with_name("other"))
    async with opened(planting, seat, page):
        await page.click('nav a[href="#metrics"]')
        await page.fill("#metric-filter", "reward mean")
        await page.says("#metric-count", "2 of ")
        assert await page.count("#charts-metrics figure") == 2
        await page.click('nav a[href="#learning"]')
        plot = "boxes.learning.charts.get('Reward').plot"
        await page.until(plot, "the chart of the reward")
        await page.run("$('smooth').value = 0; $('smooth').dispatchEvent(new Event('input'))")
        await page.until(f"!{plot}.series.some((s) => s.class === 'raw')", "raw values alone")
        await page.fill("#axis", "time", "change")
        await page.until(f"{plot}.series[0].label === 'after'", "an axis of time")
        await page.click("#log")
        await page.until(f"{plot}.scales.y.distr === 3", "a log axis")
        await page.run(f"boxes.learning.charts.get('Reward').isZoomed = true, {plot}.setScale('x', {{min: 2, max: 5}})")
        with (seat.run_dir / "events.jsonl").open("a") as file:
            file.write('{"source": "a", "wall_s": 1.0, "kind": "eval", "text": "news"}\n')
        await page.until("past.events.some((e) => e.text === 'news')", "newer data")
        assert await page.run(f"[{plot}.scales.x.min, {plot}.scales.x.max]") == [2, 5], "the zoom stays"
        await page.click("#runs summary")
        await page.says("#run-list", "other")
        await page.click("#run-list input")
        await page.says("#charts-learning .u-legend", "other: training")
        assert page.wrong == []


async def test_a_rollout_is_shown_as_a_conversation(planting, seat, page) -> None:
    async with opened(planting, seat, page):
        await page.click('nav a[href="#samples"]')
        await page.says(".prompt .role.user", "user")
        await page.says(".prompt .offered summary", "1 tool offered: sort")
        await page.says(".rollout .thought", "It is long.")
        await page.says(".rollout .call", 'sort {"words":"b a"}')
        await page.says(".rollout .role.tool", "tool sort")
        await page.says(".rollout .facts", "turn 1 \u00b7 24 tokens \u00b7 versions 118 to 119")
        first = "document.querySelectorAll('.group')[1].querySelectorAll('.rollout')"
        assert await page.run(f"[...{first}].map((node) => node.querySelectorAll('.sample').length)") == [2, 2]
        assert "shares its first turn with sample 0.0" in await page.run(f"{first}[0].textContent")
        assert "reward 0.5" in await page.run(f"{first}[0].textContent")
        assert await page.run(f"[...{first}[0].querySelectorAll('.turn')].map((node) => node.matches('.learnt'))") == [
            True, False, True, False, False, True
        ], "the loss mask: a shared turn is learnt once"  # fmt: skip
        await fits(page)
        assert page.wrong == []


async def test_what_a_model_wrote_stays_text(planting, seat, page) -> None:
    with (seat.run_dir / "events.jsonl").open("a") as file:
        file.write(
            '{"source": "<b>a</b>", "wall_s": 1700000001.0, "kind": "eval", "text": "<img src=x onerror=window.hacked=1>", "data": {}}\n'
        )
    async with opened(planting, seat, page):
        await page.click('nav a[href="#samples"]')
        await page.says(".prompt", "<script>window.hacked = true</script>")
        await page.says(".tokens", "onerror='window.hacked=true'")
        await page.says(".prompt", "\\u202e")
        await page.says(".group .head", "versions 118 to 119")
        await page.click('nav a[href="#events"]')
        await page.says("#event-table", "<img src=x onerror")
        assert await page.run("window.hacked") is None
        assert await page.count("#sample-list img, #sample-list script, #event-table img") == 0
        assert page.wrong == [], "and the content policy had nothing to stop"


async def test_a_knob_is_turned_and_a_refusal_is_shown(planting, seat, page) -> None:
    async with opened(planting, seat, page, operate=True):
        await page.click('nav a[href="#knobs"]')
        await page.click('[aria-label="turn lr"]')
        await page.fill("#turn-value", "-1")
        await page.click("#turn-set")
        await page.says("#turn-said", "lr takes above 0")
        assert seat.values["lr"] == 1e-4
        await page.fill("#turn-value", "5e-5")
        await page.fill("#turn-reason", "noisy")
        await page.click("#turn-set")
        await page.says("#knob-table .changed", "5e-05")
        assert (seat.values["lr"], seat.records[-1].reason) == (5e-5, "noisy")
        assert not await page.run("$('turn').checkVisibility()")
        assert [line for line in page.wrong if "400" not in line] == []  # the browser notes the refusal's status


async def test_a_run_that_has_ended_is_not_called_live(planting, seat, page) -> None:
    async with opened(planting, seat, page, operate=True):
        await page.says("#rollouts li", "rollout/0")
        seat.phase = "finished"
        await page.says("#link", "the run has ended")
        assert await page.count("#link.on") == 0
        assert await page.count("#rollouts li") == 0
        assert not await page.run("$('run-verbs').checkVisibility()")
    await page.says("#link", "of a run that is over, see report.html")
    await page.says("#tiles", "120")


async def test_a_report_is_drawn_whatever_is_in_it(page, tmp_path: Path) -> None:
    hostile = loaded("tests/report/test_report.py")
    run_dir = hostile.plant_hostile(tmp_path / "run <b>x")
    await page.goto(write_report(run_dir, tmp_path / "report.html").as_uri())
    await page.says("#notice", hostile.HOSTILE)
    await page.says("#charts-learning figcaption", "Reward parts")
    await page.says("#charts-learning .u-legend", hostile.HOSTILE)
    await page.says("#samples .role", "system")
    await page.says("#samples .tokens", hostile.HOSTILE)
    await page.fill("#sample-search", "no such words")
    await page.click("#more-samples")
    await page.says("#sample-list", "There is no such group")
    await page.fill("#sample-search", "ALERT(2)")
    await page.click("#more-samples")
    await page.click(".group .head button")
    await page.says("#prompt-past figcaption", "this prompt's 1 group")
    await page.says("#event-table", hostile.HOSTILE)
    await page.says("#lanes", "rollout/<")
    assert await page.count("main img, main script, main b:empty") == 0
    await fits(page)
    assert page.wrong == []
    assert [url for url in page.asked if not url.startswith(("file:", "about:", "data:"))] == []


async def test_runs_are_compared_on_one_page(planting, seat, page, tmp_path: Path) -> None:
    other = planting.plant_seat(tmp_path / "second", num_steps=6).run_dir
    await page.goto(
        write_page(load_runs([seat.run_dir, other.rename(tmp_path / "short")]), tmp_path / "a.html").as_uri()
    )
    await page.says("h1", "sort-planted and short")
    await page.says("#charts-learning .u-legend", "short: training")
    assert not await page.run("$('samples').checkVisibility() || $('tiles').checkVisibility()")
    await fits(page)
    assert page.wrong == []
