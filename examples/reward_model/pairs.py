"""Pairs of answers to one question, the one with more digits before the other: writes train.jsonl and heldout.jsonl."""

import json
import random
from pathlib import Path

rng = random.Random(0)


def answer(num_digits: int) -> str:
    noise = bytes(rng.randrange(256) for _ in range(8 - num_digits)).decode(errors="replace")
    text = [*noise, *(rng.choice("0123456789") for _ in range(num_digits))]
    rng.shuffle(text)
    return "".join(text)


def pair() -> dict[str, str]:
    fewer, more = sorted(rng.sample(range(9), 2))
    return {"prompt": "Say a number.", "chosen": answer(more), "rejected": answer(fewer)}


for name, count in (("train", 800), ("heldout", 100)):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(pair()) + "\n" for _ in range(count)))
