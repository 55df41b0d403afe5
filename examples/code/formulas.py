"""A model that writes code: a line of Python for a formula in words, judged by unit tests in a sandbox.

python formulas.py            # writes model/ and data/ beside this file
myxa up sft.toml              # the model learns the form, and typical mistakes
myxa up rl.toml               # it learns to pass the tests
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
INPUTS = (0, 1, 5, -3, 12)


def written(first: tuple[str, int], second: tuple[str, int], *, has_parentheses: bool = True) -> str:
    """ "plus 3" and "times 4" are `(x + 3) * 4`."""
    inner = f"x {SIGNS[first[0]]} {first[1]}"
    if second[0] == "times" and first[0] != "times" and has_parentheses:
        inner = f"({inner})"
    return f"f = lambda x: {inner} {SIGNS[second[0]]} {second[1]}"


def tests(first: tuple[str, int], second: tuple[str, int]) -> str:
    """The row's label: arguments of `f`, and what it is to return."""

    def applied(value: int, step: tuple[str, int]) -> int:
        word, number = step
        return value + number if word == "plus" else value - number if word == "minus" else value * number

    outputs = [applied(applied(x, first), second) for x in INPUTS]
    return json.dumps({"fn_name": "f", "inputs": [[x] for x in INPUTS], "outputs": outputs})


def demonstration(first: tuple[str, int], second: tuple[str, int], rng: random.Random) -> str:
    """Right about three times out of ten; else without parentheses, in the wrong order, with a wrong sign or broken."""
    slip = None if rng.random() < 0.3 else rng.randrange(4)
    if slip == 0:
        return written(first, second, has_parentheses=False)
    if slip == 1:
        return written(second, first)
    if slip == 2:
        return written((rng.choice(list(SIGNS)), first[1]), second)
    return written(first, second) + (")" if slip == 3 else "")


def rows(num: int, seed: int) -> Iterator[dict[str, str]]:
    rng = random.Random(seed)
    for _ in range(num):
        first, second = ((rng.choice(list(SIGNS)), rng.randrange(2, 100)) for _ in range(2))
        yield {
            "prompt": f"x {first[0]} {first[1]}, then {second[0]} {second[1]}",
            "label": tests(first, second),
            "demonstration": demonstration(first, second, rng),
        }


def main(folder: Path = HERE, num_rows: int = 20_000) -> None:
    """Make the data, with held-out rows whose formulas are in no other, and a small random model."""
    from myxa.actors.models.tiny import make_tiny_model

    held_out = list(rows(128, seed=2))
    unseen = {row["prompt"] for row in held_out}
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    trained = [row for row in rows(num_rows, seed=1) if row["prompt"] not in unseen]
    for name, found in (("train", trained), ("heldout", held_out)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    make_tiny_model(folder / "model", preset="0p5m", seed=0)


if __name__ == "__main__":
    main()
