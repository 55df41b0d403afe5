"""Users' functions may raise anything, return anything, and ignore that they are cancelled: the actor gets an ordinary
error with the cause, by the deadline, wherever the function runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.user_code import loop
from myxa.actors.user_code.loop import TookTooLong, UserRaised, within
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError

CODE = """
import asyncio

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Number(float):
    def __float__(self):
        raise KeyboardInterrupt

class Key(str):
    def __repr__(self):
        raise RuntimeError("no words")

def deep():
    return deep()

RAISED = {
    "base": BaseException("base"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(), "generator": GeneratorExit(), "stop": StopIteration(4),
    "unspeakable": Unspeakable(), "long": ValueError("x" * 10**6),
}
RETURNED = {
    "none": None, "text": "1.0", "nan": float("nan"), "inf": float("-inf"), "huge": 10**400, "wide": 1e39,
    "complex": 1j, "list": [1.0], "float": Number(1.0), "key": {Key("a"): 1.0}, "part": {"reward": 1.0, "x": None},
    "number": {1: 2.0, "reward": 1.0}, "empty": {},
}

def act(completion):
    if completion.text == "recursion":
        deep()
    if completion.text in RAISED:
        raise RAISED[completion.text]
    return RETURNED.get(completion.text, 1.0)

async def act_later(completion):
    await asyncio.sleep(0)
    return act(completion)
"""
WORDS = {
    "base": "raised BaseException: base", "exit": "raised SystemExit: 3", "interrupt": "raised KeyboardInterrupt: ",
    "cancelled": "raised CancelledError: ", "generator": "raised GeneratorExit: ", "stop": "raised",
    "unspeakable": "raised Unspeakable: (no text: its __str__ raised RuntimeError)", "long": "raised ValueError: xxx",
    "recursion": "raised RecursionError: ", "none": "returned a value of type NoneType",
    "text": "returned a value of type str", "nan": "returned nan", "inf": "returned -inf",
    "huge": "returned a number that is too large", "wide": "returned 1e+39, which is too large for a float32",
    "complex": "returned a value of type complex", "list": "returned a value of type list",
    "float": "returned a Number that raised KeyboardInterrupt",
    "key": "returned a dict that raised RuntimeError: no words", "part": 'returned a value of type NoneType as "x"',
    "number": "returned a dict with the key 1, which is not text",
    "empty": 'returned a dict without "reward"; it has nothing',
}  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "settings"),
    [("act", {}), ("act_later", {}), ("act_later", {"workers": 1})],
    ids=["process", "side-by-side", "process-async"],
)
async def test_whatever_a_reward_does_is_told_and_the_next_call_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    made = Rewarder(RewardSettings(fn=f"{file}:{fn}", pause_after=0, **settings))
    try:
        for text, words in WORDS.items():
            with pytest.raises(UserCodeError) as caught:
                await made.score(Completion(group_id=0, index=0, messages=(), prompt="?", text=text))
            assert f'" {words}' in str(caught.value), text
            assert len(str(caught.value)) < 4000
            fine = Completion(group_id=0, index=0, messages=(), prompt="?", text="fine")
            assert (await made.score(fine)).value == 1.0
    finally:
        await made.close()


async def _stubborn(until: asyncio.Event) -> float:
    while not until.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return 1.0


async def test_a_coroutine_that_will_not_be_cancelled_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GRACE_S", 0.1)
    end = asyncio.Event()
    with pytest.raises(TookTooLong) as caught:
        await within(_stubborn(end), 0.1)
    assert caught.value.hangs
    caller = asyncio.ensure_future(within(_stubborn(end), 60.0))
    await asyncio.sleep(0.05)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    end.set()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_who_cancelled_is_told_apart() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    with pytest.raises(UserRaised):
        await within(cancels_itself(), 5.0)
    with pytest.raises(TookTooLong) as caught:
        await within(asyncio.sleep(60), 0.01)
    assert not caught.value.hangs
