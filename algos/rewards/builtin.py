"""The built-in rewards: pure functions of a completion, by name. 1.0 is right, 0.0 is wrong, nothing between.

Those with a label read the answer by `extraction.py`; of several accepted labels any one counts. Their arguments are
bound and checked once, before the first completion.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import msgspec

from ...core.completions import Completion
from ..arguments import bind
from .extraction import accepted_labels, after_thought, answer_of_label, labels_of_numbers, read_answer
from .mathematics import SECONDS, math_equal, prepare
from .numbers import last_quantity, parse_quantity
from .words import choice, f1

DEFAULT_FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
TOLERANCE = Fraction(1, 10**6)
"""Of `numeric`, relative, for labels that are no whole numbers."""


def exact(completion: Completion, *, ignore_case: bool = False) -> float:
    """Whether the answer, or the whole text, is the label, after runs of white space are made one space."""

    def plain(text: str) -> str:
        joined = " ".join(unicodedata.normalize("NFC", text).split())
        return joined.casefold() if ignore_case else joined

    answers = {plain(read_answer(completion.text).text), plain(completion.text)}
    return float(not answers.isdisjoint(map(plain, accepted_labels(completion.label))))


def numeric(completion: Completion, *, tolerance: float | None = None, absolute: float = 0.0) -> float:
    """Whether the answer is the label as a number, within `tolerance * |label|` or `absolute`. Without `tolerance`, a
    label that is a whole number is met exactly, others to 1e-6. A marked answer is one number, with a unit or `x =` if
    it likes, or wrong; in unmarked text the last number counts. Raises ValueError for a label that is no number."""
    quantities = (parse_quantity(answer_of_label(label)) for label in labels_of_numbers(completion.label))
    expected = [quantity for quantity in quantities if quantity is not None]
    if not expected:
        raise ValueError(f"the label {completion.label[:80]!r} is not a number")
    text = read_answer(completion.text)
    answer = parse_quantity(text.text)
    if answer is None and not text.is_marked:
        answer = last_quantity(text.text)
    if answer is None:
        return 0.0
    limits = [TOLERANCE if quantity.value.denominator > 1 else Fraction(0) for quantity in expected]
    limits = limits if tolerance is None else [Fraction(tolerance)] * len(expected)
    pairs = zip(expected, limits, strict=True)
    return float(any(answer.equals(quantity, relative=limit, absolute=Fraction(absolute)) for quantity, limit in pairs))


def regex(completion: Completion, *, pattern: str) -> float:
    """Whether the pattern is found; with a group in it, whether the last match's first group is the label."""
    compiled = _compiled(pattern)
    if not compiled.groups:
        return float(compiled.search(completion.text) is not None)
    matches = deque(compiled.finditer(completion.text), maxlen=1)
    return float(bool(matches) and (matches[0][1] or "").strip() == completion.label.strip())


def text_format(completion: Completion, *, pattern: str = DEFAULT_FORMAT) -> float:
    """Whether the whole answer matches the pattern (a dot matches line ends too); where the prompt began the thought,
    its opening tag may count as the answer's."""
    texts = [completion.text, *(["<think>" + completion.text] if completion.begins_in_thought else [])]
    return float(any(map(_compiled(pattern, re.DOTALL).fullmatch, texts)))


def workflow(completion: Completion) -> float:
    """What the workflow said that its sample is worth. Raises ValueError if it said nothing."""
    if completion.reward is None:
        raise ValueError("the workflow said no reward; it does so by `return ctx.episode.sample(reward=...)`")
    return completion.reward


@lru_cache(maxsize=16)
def _compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(pattern, flags)


RewardValue = float | dict[str, float]
RewardFunction = Callable[[Completion], RewardValue]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in reward and where it may run."""

    fn: Callable[..., float]
    takes_pattern: bool = False
    seconds: float = 0.0
    """Where it never runs inside an actor's own process: its time limit there."""
    prepare: Callable[[], object] | None = None
    """What a worker process does before the first completion, for it is slow."""
    reads_answer: bool = False
    """It judges what is answered, not what was thought before."""


WORKFLOW = "workflow"
"""Not judged here: the workflow says it."""
BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin(exact, reads_answer=True),
    "numeric": Builtin(numeric, reads_answer=True),
    "math": Builtin(math_equal, seconds=SECONDS, prepare=prepare, reads_answer=True),
    "f1": Builtin(f1, reads_answer=True),
    "choice": Builtin(choice, reads_answer=True),
    "regex": Builtin(regex, takes_pattern=True, reads_answer=True),
    "format": Builtin(text_format, takes_pattern=True),
    WORKFLOW: Builtin(workflow),
}


def bind_builtin(
    name: str,
    *,
    pattern: str = "",
    args: Mapping[str, Any] | None = None,
    strip_thinking: bool = True,
    key: str = "reward.args",
) -> RewardFunction:
    """The named reward with its arguments, from `key` of the run file. `strip_thinking`: it reads only what follows a
    model's thoughts, unless its pattern speaks of them. Raises ConfigError for arguments that it does not take."""
    builtin = BUILTINS[name]
    arguments = dict(args or {})
    if pattern and builtin.takes_pattern:
        arguments["pattern"] = pattern
    fn = bind(builtin.fn, arguments, key=key, what=f'reward "{name}"')
    is_stripped = strip_thinking and builtin.reads_answer and "think" not in pattern
    return partial(_after_thought, fn) if is_stripped else fn


def _after_thought(fn: RewardFunction, completion: Completion) -> RewardValue:
    text = after_thought(completion.text, begins_inside=completion.begins_in_thought)
    return 0.0 if text is None else fn(msgspec.structs.replace(completion, text=text))


def as_the_only_one(fn: RewardFunction, name: str) -> RewardFunction:
    """A built-in that alone judges: it would silently overrule the reward of the workflow."""
    return fn if name == WORKFLOW else partial(_judged_by_text, fn, name)


def _judged_by_text(fn: RewardFunction, name: str, completion: Completion) -> RewardValue:
    if completion.reward is not None:
        raise ValueError(
            f'the workflow said a reward, and reward.fn = "{name}" does not heed it; set reward.fn = "{WORKFLOW}"'
        )
    return fn(completion)
