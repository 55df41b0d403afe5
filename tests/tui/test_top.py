"""`myxa top` driven by keys, against the real control server over planted answers: what a person would see."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from myxa.core.errors import ConfigError
from myxa.launch.cli import main
from myxa.launch.control.client import ControlNote
from myxa.launch.tui.app import Seen, TopApp
from myxa.launch.tui.feed import Feed

PATIENCE_S = 20.0


def shown(app: TopApp) -> str:
    """All that is on the screen, as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def until(pilot: Pilot[None], condition: Callable[[str], bool], what: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        await pilot.pause()
        text = shown(pilot.app)  # type: ignore[arg-type]
        if condition(text):
            return text
        assert time.monotonic() < deadline, f"{what} was not seen within {PATIENCE_S:g} s; the screen says:\n{text}"
        await asyncio.sleep(0.05)


async def told(pilot: Pilot[None], words: str) -> None:
    """A notice came up; on the screen it is wrapped."""
    await until(pilot, lambda _: any(words in notice.message for notice in pilot.app._notifications), words)


async def sees(pilot: Pilot[None], *words: str) -> str:
    return await until(pilot, lambda text: all(word in " ".join(text.split()) for word in words), " and ".join(words))


@contextlib.asynccontextmanager
async def driven(
    planting: ModuleType, seat: Any, *, size: tuple[int, int] = (80, 24), only_view: bool = False
) -> AsyncIterator[tuple[Pilot[None], ControlNote, contextlib.AsyncExitStack]]:
    """The application on a live seat; closing the stack ends the run under it."""
    async with contextlib.AsyncExitStack() as stack:
        note = await stack.enter_async_context(planting.serving(seat))
        app = TopApp(Feed.of(Path(note.run_dir), only_view=only_view))
        async with app.run_test(size=size) as pilot:
            yield pilot, note, stack


async def sets(pilot: Pilot[None], line: str) -> None:
    pilot.app.screen.query_one("#change", Input).value = ""
    await pilot.press(*line, "enter")


class Leaving(Static):
    """Has the application look once more while its widgets are being taken away."""

    def on_unmount(self) -> None:
        app = cast("TopApp", self.app)
        assert app._run_view is not None
        app.post_message(Seen(app._run_view))


async def test_the_run_at_a_glance_in_a_terminal_of_any_size(planting, seat) -> None:
    async with driven(planting, seat) as (pilot, _, _):
        text = await sees(pilot, "running step 120 of 400", "generation is the bottleneck", "85 of 96")
        lines = text.splitlines()
        assert len(lines) == 24
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(" sort  running")
        assert "q quit" in lines[-1]
        await pilot.press("2")
        text = await sees(pilot, "1 worker-b", "pid 4002")
        assert re.search(r"trainer/0 +up +0 worker-a +[█▓]{7,8}", text)
        for size in ((20, 6), (240, 70)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda text: "running" in text, "the run")
            for page in "1234":
                await pilot.press(page)
                await pilot.pause()
        await pilot.resize_terminal(80, 24)
        await pilot.press("1")
        await sees(pilot, "85 of 96")
        await pilot.app.mount(Leaving("leaving"))  # what is said while the screen goes is left unsaid


async def test_a_knob_is_turned_with_a_reason_and_quitting_waits_for_no_answer(planting, seat) -> None:
    async with driven(planting, seat) as (pilot, _, _):
        await pilot.press("3")
        await sees(pilot, "temperature", "request", "above 0")
        await pilot.press("down")  # from clip_low to lr
        await pilot.press("enter")
        await sees(pilot, "Step size of the optimizer.", "It takes above 0", "lr=0.0001")
        await sets(pilot, "lr=5e-5 -m 'too noisy'")
        await told(pilot, "lr  0.0001 -> 5e-05  trainer/0, at step")
        record = seat.records[-1]
        assert (record.reason, record.moves[0].new, seat.values["lr"]) == ("too noisy", 5e-5, 5e-5)
        await sees(pilot, "lr 5e-05")
        await pilot.press("4")
        await sees(pilot, "lr 0.0001 -> 5e-05")
        began = time.monotonic()
        await pilot.press("q")
        await pilot.pause()
    assert time.monotonic() - began < PATIENCE_S / 2


async def test_escape_changes_nothing_and_a_refusal_is_shown_with_its_remedy(planting, seat) -> None:
    async with driven(planting, seat) as (pilot, _, _):
        await pilot.press("3")
        await sees(pilot, "max_staleness")
        await pilot.press("enter")
        await sees(pilot, "Escape leaves")
        await pilot.press("backspace", "9", "escape")
        await until(pilot, lambda text: "Escape leaves" not in text, "the end of the line")
        assert (seat.values, len(seat.records)) == (planting.FIRST, 5)
        await pilot.press("down", "enter")
        await sees(pilot, "Escape leaves")
        for line, said in (
            ("lr=abc", "lr = 'abc': must be a number"), ("lr", "must look like NAME=VALUE"), ("lr='1", "close the quotes"),
            ("lr=1 --fort=3s", "unrecognized arguments: --fort=3s"), ("lr=-1", "lr takes above 0"), ("lr=1", "more than 10 times"),
        ):  # fmt: skip
            await sets(pilot, line)
            await sees(pilot, said)
        assert seat.values["lr"] == 1e-4
        await sets(pilot, "lr=1 --force")
        await told(pilot, "lr  0.0001 -> 1  trainer/0")
        assert seat.values["lr"] == 1.0


async def test_through_the_read_only_socket_nothing_can_be_turned(planting, seat) -> None:
    async with driven(planting, seat, size=(130, 30), only_view=True) as (pilot, _, _):
        await sees(pilot, "read-only: knobs can be seen, not turned")
        await pilot.press("3")
        await sees(pilot, "max_staleness")
        await pilot.press("enter")
        await told(pilot, "only the read-only socket is within reach")
        assert not pilot.app.screen.query_one("#change").display
        assert len(seat.records) == 5


async def test_a_run_that_falls_silent_keeps_its_last_picture_comes_back_and_finishes(planting, seat) -> None:
    async with driven(planting, seat, size=(130, 40)) as (pilot, _, _):
        await sees(pilot, "running step 120")
        seat.silent = {"status"}
        await sees(pilot, "no answer for", "ask again", "step 120", "85 of 96")
        seat.silent, seat.version = set(), 121
        await sees(pilot, "step 121")
        await until(pilot, lambda text: "no answer" not in text, "the end of the silence")
        seat.phase = "finished"
        await sees(pilot, "finished", "the run has ended")


async def test_a_wide_terminal_shows_all_of_an_actor_and_keeps_it_when_the_run_ends(planting, seat) -> None:
    async with driven(planting, seat, size=(130, 50)) as (pilot, _, stack):
        text = await sees(pilot, "<- bound", "v120", "v119", "compute 9", "drains")
        assert re.search(r"lag 0 +█+ +14", text)
        await pilot.press("2")
        await sees(pilot, "trainer/0", "pid 4002")
        await pilot.press("down", "down")
        await sees(pilot, "rollout/0", "pid 4004", "rollout/tokens_per_s")
        await pilot.press("1")
        await stack.aclose()
        await sees(pilot, "the run has ended", "step 120", "85 of 96")
        await pilot.press("3")
        await sees(pilot, "max_staleness")
        await pilot.press("enter")
        await told(pilot, "nothing can be set any more")
        await pilot.press("4", "2", "r")
        await sees(pilot, "the run has ended")


def test_without_textual_the_pip_line_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("myxa.launch.commands.views.find_spec", lambda name: None)
    assert main(["top"]) == ConfigError.exit_code
    assert "pip install 'myxa[tui]'" in capsys.readouterr().err


def test_without_a_terminal_the_other_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == ConfigError.exit_code
    assert "myxa top needs a terminal" in capsys.readouterr().err
