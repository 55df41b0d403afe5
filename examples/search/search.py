"""Search-R1's shape: the model writes a search, gets passages of a local index, and answers with what they say.

    python search.py              # writes model/, data/ and index.sqlite beside this file
    myxa up sft.toml              # the model learns the form: it searches, mostly badly
    myxa up rl.toml               # it learns to search for the right words and to answer by the passages

The corpus is made up from a seed: numbers of places that do not exist. The index is SQLite's FTS5, ranked by BM25.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.completions import Completion
from myxa.core.samples import Prompt, Sample

HERE = Path(__file__).parent
INDEX = HERE / "index.sqlite"
CALL = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THINGS = ("bells", "mills", "ships", "wells")
NUM_PASSAGES = 2


def search(query: str, index: Path = INDEX) -> str:
    """The tool: the passages that fit best, one a line; "nothing" where none has any of the words."""
    words = re.findall(r"[a-z0-9]+", query.lower())[:8]  # whatever the model wrote, it is no syntax of FTS5
    if not words:
        return "nothing"
    with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True, timeout=5.0)) as base:
        found = base.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), NUM_PASSAGES),
        ).fetchall()
    return "\n".join(text for (text,) in found) or "nothing"


async def solve(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """The workflow: turns of the model, each search answered with passages, until it answers."""
    episode = ctx.episode
    turn = await episode.generate()
    while (call := CALL.search(turn.text)) and turn.finish == "stop" and episode.num_turns < ctx.max_turns:
        with episode.waits_for("tool", "search"):  # the trace, `myxa why` and metrics show how long that takes
            passages = await asyncio.to_thread(search, call[1])
        if not episode.reply("tool", passages):
            break
        turn = await episode.generate()
    return episode.sample()


def reward(completion: Completion) -> dict[str, float]:
    """1 for the right answer; whether it searched is reported beside it, and not rewarded."""
    answer = ANSWER.fullmatch(completion.text)
    is_right = completion.finish == "stop" and answer is not None and answer[1] == completion.label
    return {"reward": float(is_right), "searched": float(len(completion.turns) > 1)}


# -- the corpus, the questions and the demonstrations


def corpus(seed: int, num_places: int = 600) -> dict[str, dict[str, str]]:
    """Place -> thing -> how many of it there are."""
    rng = random.Random(seed)
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    places = list(dict.fromkeys("".join(rng.choices(syllables, k=3)) for _ in range(2 * num_places)))[:num_places]
    return {place: {thing: str(rng.randrange(10, 1000)) for thing in THINGS} for place in places}


def write_index(path: Path, known: dict[str, dict[str, str]]) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("CREATE VIRTUAL TABLE passages USING fts5(text)")
        rows = ((f"{place} {thing} {number}",) for place, things in known.items() for thing, number in things.items())
        base.executemany("INSERT INTO passages VALUES (?)", rows)


def demonstration(place: str, thing: str, index: Path, rng: random.Random) -> list[dict[str, str]]:
    """Turns of a solution that is right about three times out of ten."""
    slip = None if rng.random() < 0.3 else rng.randrange(4)
    if slip == 0:  # it guesses
        return [{"role": "assistant", "content": f"<answer>{rng.randrange(10, 1000)}</answer>"}]
    query = {1: thing, 2: place}.get(slip if slip is not None else -1, f"{place} {thing}")
    passages = search(query, index)
    numbers = re.findall(r"\d+", passages)
    number = numbers[-1] if slip == 3 else numbers[0]  # the wrong passage
    return [
        {"role": "assistant", "content": f"<search>{query}</search>"},
        {"role": "tool", "content": passages},
        {"role": "assistant", "content": f"<answer>{number}</answer>"},
    ]


def write_questions(path: Path, known: dict[str, dict[str, str]], num: int, index: Path, seed: int) -> None:
    """A JSONL dataset of `num` rows about these places."""
    rng, places = random.Random(seed), list(known)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num):
            place, thing = rng.choice(places), rng.choice(THINGS)
            row = {"prompt": f"{thing} of {place}?", "label": known[place][thing]}
            file.write(json.dumps({**row, "turns": demonstration(place, thing, index, rng)}) + "\n")


def main(folder: Path = HERE, num_rows: int = 30_000, num_places: int = 600) -> None:
    """Make the index, the questions and a small random model; a sixth of the places is held out."""
    from myxa.actors.models.tiny import make_tiny_model

    known, index = corpus(1, num_places), folder / INDEX.name
    write_index(index, known)
    cut = len(known) * 5 // 6
    trained, held_out = dict(list(known.items())[:cut]), dict(list(known.items())[cut:])
    write_questions(folder / "data" / "train.jsonl", trained, num_rows, index, seed=2)
    write_questions(folder / "data" / "heldout.jsonl", held_out, 256, index, seed=3)
    make_tiny_model(folder / "model", preset="0p5m", seed=0)


if __name__ == "__main__":
    main()
