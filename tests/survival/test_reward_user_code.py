"""Users' functions may raise anything, return anything, and ignore that they are cancelled: the actor gets an ordinary
error with the cause, by the deadline, wherever the function runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.rewards.rewarder import Rewarder
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
