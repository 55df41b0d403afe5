"""`myxa demo`: from random weights to a model that sorts digits, on a laptop, by the code that runs on clusters.
`myxa init`: a task of one's own, which begins with the demo's model.

Two ordinary runs, one after the other (`sft.toml`, `rl.toml` beside this file): a short imitation of mostly wrong
demonstrations, then asynchronous GRPO. A demonstration is right with probability `P_RIGHT`, else a typical slip, so
that every group of samples has spread.
"""

from __future__ import annotations

import io
import json
import random
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import orjson

from ...core.config import RunConfig, load_config
from ...core.config.hub import hub_text
from ...core.config.loading import toml_value
from ...core.errors import ConfigError
from ..first_failure import RunEnd
from ..launcher import LaunchOptions, launch
from ..waiting import Waiting

DIGITS = "0123456789"
SHORTEST, LONGEST = 3, 7
P_RIGHT = 0.3

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
    return "".join(sorted(prompt.split()[1]))


def rows(num: int, seed: int) -> Iterator[dict[str, str]]:
    rng = random.Random(seed)
    for _ in range(num):
        prompt = question(rng)
        shown = answer(prompt) if rng.random() < P_RIGHT else rng.choice(_SLIPS)(prompt.split()[1])
        yield {"prompt": prompt, "label": answer(prompt), "demonstration": shown}


def write_rows(path: Path, num: int, seed: int, *, exclude: frozenset[str] = frozenset()) -> None:
    """Write a JSONL file of `num` rows; prompts in `exclude` are left out (held-out prompts stay unseen)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (orjson.dumps(row) for row in rows(num, seed) if row["prompt"] not in exclude)
    path.write_bytes(b"\n".join(lines) + b"\n")


PRESET = "0p5m"
NUM_DEMONSTRATIONS = 12_800
NUM_PROMPTS = 20_000
NUM_HELDOUT = 256


def prepare(folder: Path, seed: int) -> None:
    from ...actors.models.tiny import make_tiny_model  # imports torch

    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", preset=PRESET, seed=seed)
    data = folder / "data"
    write_rows(data / "heldout.jsonl", NUM_HELDOUT, seed=seed + 1)
    unseen = frozenset(orjson.loads(line)["prompt"] for line in (data / "heldout.jsonl").read_bytes().splitlines())
    write_rows(data / "demonstrations.jsonl", NUM_DEMONSTRATIONS, seed=seed + 2, exclude=unseen)
    write_rows(data / "prompts.jsonl", NUM_PROMPTS, seed=seed + 3, exclude=unseen)
    for name in ("sft.toml", "rl.toml"):
        (folder / name).write_text((files("myxa.launch.demo") / name).read_text())


_NEXT_STEPS = """try next
  - myxa up {folder}/rl.toml --set async.max_staleness=0     the same without asynchrony: watch the trainer wait
  - myxa init my-task                                        your dataset, your reward, your run file"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line may change."""

    folder: Path
    seed: int = 0
    engines: int = 1
    ranks: int = 1
    is_quiet: bool = False


def run_demo(options: DemoOptions) -> int:
    code = warm_up(options).exit_code
    if code or not (options.folder / "sft").exists():  # it was stopped
        return code
    code = _launch(options, "rl", [f"roles.rollout.count={options.engines}"]).exit_code
    if code == 0:
        print(_NEXT_STEPS.format(folder=options.folder), flush=True)
    return code


def warm_up(options: DemoOptions) -> RunEnd:
    """Make model and data, run the supervised stage; if it was not stopped, `<folder>/sft/export` is the warm model."""
    link = options.folder / "sft"
    link.unlink(missing_ok=True)  # of an earlier demo
    with Waiting("making model and rows", sys.stdout, is_quiet=options.is_quiet):
        prepare(options.folder, options.seed)
    result = _launch(options, "sft")
    if result.run_dir is not None and result.version == _config(options, "sft").run.num_steps:
        link.symlink_to(result.run_dir.name)
    return result


TASK_FILES = {"my_task.py": "my_task.py.txt", "run.toml": "my_task.toml", "warm_up.toml": "warm_up.toml"}
"""File -> its template."""
MADE = ("model", "train.jsonl", "heldout.jsonl")
"""What `begin_task` makes beside them."""


def begin_task(folder: Path, model: str = "", now: Callable[[str], object] = lambda _: None) -> int:
    """Write a small task that learns at once, to be changed: reward, rows and run file. `model`: the model to train, a
    folder or hub id; empty: the demo's warm one is made. `now` gets what is done. Returns the exit status. Raises
    ConfigError where a file is there already or the model is not."""
    if there := [name for name in (*TASK_FILES, *MADE) if (folder / name).exists()]:
        raise ConfigError(f"{folder / there[0]} is there already", remedy="name a folder without these files")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", remedy="name a folder; a new one is made")
    hub_model = hub_text(model, "model", Path.cwd())
    if model and not hub_model and not Path(model, "config.json").is_file():
        remedy = "name a model's folder, or one of the hub: org/name"
        raise ConfigError(f"--model {model}: there is no {Path(model, 'config.json')}", remedy=remedy)
    if not model:
        warm = DemoOptions(folder / "warm-up", is_quiet=True)
        now("making a small model: it learns to answer, for 20 s to a minute")
        with redirect_stdout(io.StringIO()) as output:  # it names files that are removed below
            code = warm_up(warm).exit_code
        if code or not (warm.folder / "sft").exists():
            print(output.getvalue(), end="")
            return code or 1
        (warm.folder / "sft").resolve().joinpath("export").rename(folder / "model")
        shutil.rmtree(warm.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, template in TASK_FILES.items():
        text = (files("myxa.launch") / "templates" / template).read_text()
        shown = json.dumps(hub_model or str(Path(model).absolute()), ensure_ascii=False) if model else '"model"'
        (folder / name).write_text(text.replace('path = "model"', f"path = {shown}", 1))
    runpy.run_path(str(folder / "my_task.py"), run_name="__main__")  # writes the rows
    print(
        f"{folder} has my_task.py (reward, rows; `python my_task.py` writes the rows again) and run.toml; next:\n\n"
        f"  cd {shlex.quote(str(folder))}\n  myxa plan run.toml\n  myxa up run.toml\n\n"
        "where the model gets nothing of another task right, warm_up.toml shows it some answers first"
    )
    return 0


def _launch(options: DemoOptions, stage: str, overrides: Sequence[str] = ()) -> RunEnd:
    return launch(_config(options, stage, overrides), LaunchOptions(is_quiet=options.is_quiet))


def _config(options: DemoOptions, stage: str, overrides: Sequence[str] = ()) -> RunConfig:
    always = [
        f"run.dir={toml_value(str(options.folder.absolute()))}",
        f"run.seed={options.seed}",
        f"roles.trainer.count={options.ranks}",
    ]
    return load_config([options.folder / f"{stage}.toml"], [*always, *overrides])
