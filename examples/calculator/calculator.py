"""Two-turn tool use: the model asks a calculator with "@47*85" and answers with what it replied.

Everything a user writes for a task of their own is in this file: a workflow (how a sample comes about), a reward
(how good it is), and `main`, which makes the dataset. The run files name the functions as `calculator.py:solve`.

    python calculator.py          # writes model/ and data/ beside this file
    myxa up sft.toml              # the model learns to call the tool, mostly wrongly
    myxa up rl.toml               # it learns to do it right
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.completions import Completion
from myxa.core.samples import Prompt, Sample

HERE = Path(__file__).parent
CALL = re.compile(r"(\d{1,6})([-+*])(\d{1,6})")


def calculate(expression: str) -> str:
    """The tool: "47*85" -> "3995"; "err" for anything else."""
    match = CALL.fullmatch(expression)
    if match is None:
        return "err"
    a, op, b = int(match[1]), match[2], int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


async def solve(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """The workflow: one model turn, the tool's reply if it asked for one, the answer."""
    episode = ctx.episode
    turn = await episode.generate()
    while turn.text.startswith("@") and turn.finish == "stop" and episode.num_turns < ctx.max_turns:
        if not episode.reply("tool", calculate(turn.text[1:])):
            break
        turn = await episode.generate()
    return episode.sample()


def reward(completion: Completion) -> dict[str, float]:
    """1 for the right answer; whether the tool was used is reported beside it, and not rewarded."""
    is_right = completion.finish == "stop" and completion.text == completion.label
    return {"reward": float(is_right), "used_tool": float(len(completion.turns) > 1)}


def demonstration(question: str, rng: random.Random) -> list[dict[str, str]]:
    """Turns of a solution that is right about three times out of ten."""
    expression = question[:-1]
    slip = None if rng.random() < 0.3 else rng.randrange(4)
    if slip == 0:
        return [{"role": "assistant", "content": str(rng.randrange(100))}]
    if slip == 1:
        place = rng.randrange(len(expression))
        expression = expression[:place] + rng.choice("0123456789") + expression[place + 1 :]
    elif slip == 2:
        expression = expression[::-1]
    result = calculate(expression)
    final = result if slip != 3 else result[::-1] if result != result[::-1] else result + rng.choice("0123456789")
    return [
        {"role": "assistant", "content": "@" + expression},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": final},
    ]


def write(path: Path, num: int, seed: int) -> None:
    """A JSONL dataset of `num` rows."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num):
            question = f"{rng.randrange(100)}{rng.choice('+-*')}{rng.randrange(100)}="
            row = {
                "prompt": question,
                "label": calculate(question[:-1]),
                "turns": demonstration(question, rng),
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Make the dataset and a small random model."""
    from myxa.actors.models.tiny import make_tiny_model

    write(HERE / "data" / "train.jsonl", 30_000, seed=1)
    write(HERE / "data" / "heldout.jsonl", 256, seed=2)
    make_tiny_model(HERE / "model", preset="1m", seed=0)


if __name__ == "__main__":
    main()
