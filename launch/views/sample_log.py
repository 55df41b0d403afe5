"""Prompts and answers of a run as its files hold them, by step and set; also of a run that is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from ...actors.sinks.jsonl import OLDER_SAMPLES_FILE, SAMPLES_FILE

FILES = (OLDER_SAMPLES_FILE, SAMPLES_FILE)
"""Older groups first."""
_NUM_SHOWN = 3
_NUM_ANSWERS = 4


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """Which groups of the files."""

    step: int = -1
    """-1: of any step."""
    held_out: bool = False
    """Answers to held-out prompts, not those of training."""
    eval_set: str = ""
    """Of this evaluation set alone; empty: of every one."""

    def takes(self, group: dict[str, Any]) -> bool:
        """Whether it is one of them."""
        return (
            group.get("is_held_out", False) == self.held_out
            and self.step in (-1, group.get("step"))
            and self.eval_set in ("", group.get("eval_set"))
        )


def read_samples(run_dir: Path, wanted: SampleQuery, num_groups: int) -> list[dict[str, Any]]:
    """The newest of those, newest first; of a step that was made again the later ones. Lines that cannot be read are
    passed over."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for group in _groups(run_dir):
        if wanted.takes(group):
            key = tuple(group.get(name) for name in ("step", "eval_set", "group_id"))
            found.pop(key, None)
            found[key] = group
            if len(found) > num_groups:
                del found[next(iter(found))]
    return list(found.values())[::-1]


def sample_page(run_dir: Path) -> list[dict[str, Any]]:
    """A few groups for a page: of the first step, one in the middle and the last; then the newest held-out ones."""
    steps: dict[bool, set[int]] = {False: set(), True: set()}
    for group in _groups(run_dir):
        if isinstance(step := group.get("step"), int):
            steps[group.get("is_held_out", False) is True].add(step)
    trained, held_out = sorted(steps[False]), sorted(steps[True])
    chosen = dict.fromkeys(trained[index] for index in (0, len(trained) // 2, -1)) if trained else {}
    wanted = [SampleQuery(step) for step in chosen] + [SampleQuery(held_out[-1], held_out=True) for _ in held_out[-1:]]
    return [_shown(group) for one in wanted for group in read_samples(run_dir, one, _NUM_SHOWN)]


def _shown(group: dict[str, Any]) -> dict[str, Any]:
    """As the page wants it; a line of another version, or of another program, lacks this and that."""
    answers: Any = group.get("answers")
    told = [cast("dict[str, Any]", answer) for answer in answers if isinstance(answer, dict)] if answers else []
    return {
        **{name: group.get(name, "") for name in ("step", "outcome", "eval_set", "reason", "prompt", "label")},
        "answers": [{name: answer.get(name, "") for name in ("reward", "text")} for answer in told[:_NUM_ANSWERS]],
    }


def _groups(run_dir: Path) -> Iterator[dict[str, Any]]:
    for name in FILES:
        try:
            with (run_dir / name).open("rb") as file:
                for line in file:
                    try:
                        group: Any = orjson.loads(line)
                    except orjson.JSONDecodeError:
                        continue
                    if isinstance(group, dict):
                        yield cast("dict[str, Any]", group)
        except OSError:
            continue
