"""Reverse a word, letter by letter: a task that a byte-level model of any size learns, with data made on the spot.

A demonstration is right in three cases of ten, else a typical slip: a model that imitates them answers about a quarter
of the prompts, every group of samples has spread, and reinforcement has something to find.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path

SHORTEST, LONGEST = 3, 7
P_RIGHT = 0.3
LETTERS = string.ascii_lowercase[:10]
SLIPS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda word, _: word,
    lambda word, _: word[::-1][:-1],
    lambda word, rng: word[::-1] + rng.choice(LETTERS),
)
"""Copied, one letter short, one letter too many."""


def word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(SHORTEST, LONGEST)))


def write_rows(path: Path, num: int, seed: int, exclude: frozenset[str] = frozenset()) -> frozenset[str]:
    """JSONL rows with prompt, label and demonstration; the words written. Words of `exclude` are left out."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    words: set[str] = set()
    for _ in range(num):
        text = word(rng)
        right = rng.random() < P_RIGHT
        shown = text[::-1] if right else rng.choice(SLIPS)(text, rng)
        if text not in exclude:
            words.add(text)
            rows.append(json.dumps({"prompt": f"rev {text}", "label": text[::-1], "demonstration": shown}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return frozenset(words)


def write_data(folder: Path, seed: int, *, num_demonstrations: int, num_prompts: int, num_heldout: int) -> None:
    """`heldout.jsonl`, `demonstrations.jsonl`, `prompts.jsonl`; held-out words are in neither of the others."""
    unseen = write_rows(folder / "heldout.jsonl", num_heldout, seed + 1)
    write_rows(folder / "demonstrations.jsonl", num_demonstrations, seed + 2, unseen)
    write_rows(folder / "prompts.jsonl", num_prompts, seed + 3, unseen)
