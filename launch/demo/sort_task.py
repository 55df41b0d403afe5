"""The demo's task, made on the spot: sort the digits of a number.

A demonstration is right only in `p_right` of the cases; the rest are typical slips. A model that imitates them
answers about a quarter of the prompts, every group of samples has spread, and reinforcement has something to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

DIGITS = "0123456789"
SHORTEST, LONGEST = 3, 7

_SLIPS: tuple[Callable[[str], str], ...] = (
    lambda digits: digits,
    lambda digits: digits[::-1],
    lambda digits: "".join(sorted(digits, reverse=True)),
    lambda digits: "".join(sorted(digits))[:-1],
)
"""Copied, reversed, sorted downwards, last digit dropped."""


def question(rng: random.Random) -> str:
    """A prompt such as "sort 52713"."""
    length = rng.randint(SHORTEST, LONGEST)
    return "sort " + "".join(rng.choice(DIGITS) for _ in range(length))


def answer(prompt: str) -> str:
    """The right answer: "12357"."""
    return "".join(sorted(prompt.split()[1]))


def demonstration(prompt: str, rng: random.Random, p_right: float) -> str:
    """An answer that is right with probability `p_right` and a slip otherwise."""
    if rng.random() < p_right:
        return answer(prompt)
    return rng.choice(_SLIPS)(prompt.split()[1])


def rows(num: int, seed: int, p_right: float) -> Iterator[dict[str, str]]:
    """`num` dataset rows with prompt, label and demonstration."""
    rng = random.Random(seed)
    for _ in range(num):
        prompt = question(rng)
        yield {"prompt": prompt, "label": answer(prompt), "demonstration": demonstration(prompt, rng, p_right)}


def write_rows(path: Path, num: int, seed: int, *, p_right: float = 0.3, exclude: frozenset[str] = frozenset()) -> None:
    """Write a JSONL file of `num` rows; prompts in `exclude` are left out (held-out prompts stay unseen)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = (row for row in rows(num, seed, p_right) if row["prompt"] not in exclude)
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in kept) + b"\n")


def prompts(path: Path) -> frozenset[str]:
    """All prompts of a JSONL file written by `write_rows`."""
    return frozenset(orjson.loads(line)["prompt"] for line in path.read_bytes().splitlines())
