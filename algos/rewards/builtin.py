"""The built-in rewards: pure functions of a completion, by name. 1.0 is right, 0.0 is wrong, nothing between.

Those with a label read the answer by `extraction.py`; of several accepted labels any one counts. Their arguments are
bound and checked once, before the first completion. `math` imports math-verify and sympy, in reward worker processes
only: `prepare` bounds the memory of its process; one long operation in C, such as 9**9**9, ends only with the process.
"""

from __future__ import annotations

import logging
import re
import resource
import string
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec

from ...core.completions import Completion
from ..arguments import bind
from .extraction import MAX_CHARS, TAIL_CHARS, accepted_labels, after_thought, last_number, numbers_of, read_answer

DEFAULT_FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
TOLERANCE = Fraction(1, 10**6)
"""Of `numeric`, relative, for labels that are no whole numbers."""


def exact(completion: Completion, *, ignore_case: bool = False) -> float:
    """Whether the answer, or the whole text, is the label, character by character, after runs of white space are made
    one space."""

    def plain(text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if ignore_case else joined

    given = {plain(read_answer(completion.text).text), plain(completion.text)}
    return float(not given.isdisjoint(map(plain, accepted_labels(completion.label))))


def numeric(completion: Completion, *, tolerance: float | None = None, absolute: float = 0.0) -> float:
    """Whether the answer is the label as a number, units aside, within `tolerance * |label|` or `absolute`. Without
    `tolerance`, a label that is a whole number is met exactly, others to 1e-6. A marked answer is one number or wrong;
    in unmarked text the last number counts. Raises ValueError for a label that is no number."""
    labels = (number for label in accepted_labels(completion.label) for number in numbers_of(label))
    wanted = [*labels, *numbers_of(read_answer(completion.label).text)]
    if not wanted:
        raise ValueError(f"the label {completion.label[:80]!r} is not a number")
    answer = read_answer(completion.text)
    given = numbers_of(answer.text) or (() if answer.is_marked else last_number(answer.text))

    def is_near(one: Fraction, label: Fraction) -> bool:
        usual = TOLERANCE if label.denominator > 1 else Fraction(0)
        relative = usual if tolerance is None else Fraction(tolerance)
        return abs(one - label) <= max(Fraction(absolute), relative * abs(label))

    return float(any(is_near(one, label) for one in given for label in wanted))


def regex(completion: Completion, *, pattern: str) -> float:
    """Whether the pattern is found; with a group in it, whether the last match's first group is the label."""
    compiled = _compiled(pattern)
    if not compiled.groups:
        return float(compiled.search(completion.text) is not None)
    found = deque(compiled.finditer(completion.text), maxlen=1)
    return float(bool(found) and (found[0][1] or "").strip() == completion.label.strip())


def text_format(completion: Completion, *, pattern: str = DEFAULT_FORMAT) -> float:
    """Whether the whole answer matches the pattern (a dot matches line ends too)."""
    return float(_compiled(pattern, re.DOTALL).fullmatch(completion.text) is not None)


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
VERDICTS = frozenset({"yes", "no", "noanswer"})
"""Half of one of these is worth nothing."""


def f1(completion: Completion) -> float:
    """Harmonic mean of precision and recall of the answer's words, each counted as often as it occurs; case,
    punctuation and articles aside (the measure of SQuAD). Yes and no are right or wrong."""
    given = _words(read_answer(completion.text).text)
    return max(_overlap(given, _words(label)) for label in accepted_labels(completion.label))


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _overlap(given: list[str], wanted: list[str]) -> float:
    if given == wanted:
        return 1.0
    if not given or not wanted or VERDICTS & {" ".join(given), " ".join(wanted)}:
        return 0.0
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted))


SECONDS = 5
MAX_MEMORY_BYTES = 2 << 30
"""That a worker may take beyond what it has when it begins."""
MATH_TAIL_CHARS = 4000
"""Of unmarked text, so much of the end is looked at."""
MAX_ANSWER_CHARS = 2000
"""What is marked as the answer and is longer is none."""


def math_equal(completion: Completion, *, seconds: int = SECONDS) -> float:
    """Whether answer and label are mathematically equal: plain numbers exactly, which math-verify would round, and all
    else by math-verify. An expression that takes longer than `seconds`
    is wrong. Raises ValueError for a label that it cannot read."""
    answer = read_answer(completion.text)
    given, num_read = numbers_of(answer.text), 0
    text = answer.text[-MATH_TAIL_CHARS:]
    if answer.is_marked:
        text = f"\\boxed{{{answer.text}}}" if len(answer.text) <= MAX_ANSWER_CHARS else ""
    for label in map(str.strip, accepted_labels(completion.label)):
        wanted = numbers_of(label)
        if (label and answer.text == label) or not set(given).isdisjoint(wanted):
            return 1.0
        expected = _parsed(label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}", seconds)
        num_read += bool(expected)
        if not (given and wanted) and any(
            _is_equal(one, other, seconds) for one in expected for other in _parsed(text, seconds)
        ):
            return 1.0
    if not num_read:
        raise ValueError(f"math-verify cannot read the label {completion.label[:80]!r}")
    return 0.0


def prepare() -> None:
    """Of a worker process: import what compares, have it do so once, for it is slow at first, and bound the memory."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for label, answer in ((r"\frac{1}{2}", r"\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"(3,\infty)", "x>3")):
        _is_equal(_parsed(f"${label}$", SECONDS), _parsed(f"${answer}$", SECONDS), SECONDS)
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _parsed(text: str, seconds: int) -> list[Any]:
    # Heavy (sympy), and only worker processes may have it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # pyright: ignore[reportMissingTypeStubs]

    # Of a box no expression of plain text: of "> 42" it would take the 42.
    kinds = (
        [LatexExtractionConfig()] if text.startswith("\\boxed") else [LatexExtractionConfig(), ExprExtractionConfig()]
    )
    return cast("list[Any]", parse(text, kinds, parsing_timeout=seconds))


def _is_equal(wanted: Any, given: Any, seconds: int) -> bool:
    from math_verify import verify  # pyright: ignore[reportMissingTypeStubs]

    sides = [] if _sides(wanted) else [side for side in _sides(given) if not side.free_symbols]
    return all(
        verify(wanted, one, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=seconds)
        for one in (given, *sides)
    )


def _sides(of: Any) -> list[Any]:
    """Of an equation, or a chain of them: 41 = 42 is not 42."""
    parts = [of] if _is_equation(of) else list(getattr(of, "_unsorted_args", ()))
    is_chain = all(map(_is_equation, parts)) and all(a.rhs == b.lhs for a, b in pairwise(parts))
    return [side for part in parts for side in part.args] if is_chain else []


def _is_equation(of: Any) -> bool:
    return getattr(of, "rel_op", "") == "=="  # sympy's


# A letter, alone or set apart from what follows: "B", "(b)", "\text{B}", "**B.**", "option B", "B) Paris".
CHOICE = re.compile(
    r"[\W_]{0,8}(?:\\[a-z]{4,6}\{)?[\W_]{0,8}(?:(?:option|choice)\s)?[\W_]{0,8}"
    r"(?:([A-Za-z])[\W_]*|([A-Z])[\W_]*[).:\]}*].*)",
    re.DOTALL,
)
# In running text: "B is correct", "I think it's B", "option B.", a line "B", "(B)".
SAID_CHOICE = re.compile(
    r"\b([A-Z])\b\W{0,3}\sis\s(?:the\s)?(?:most\s|only\s)?(?:correct|right|best)\b"
    r"|\b(?:it['’]s|it is|option|choice|pick|with|therefore,?)\s(?:here\s)?(?:is\s)?[*(]{0,4}([A-Z])"
    r"(?=[*)]{0,4}\s?(?:[.;]|$|because\b|since\b))"
    r"|^[\s*_]{0,8}\(?([A-Z])\)?[.:]?[\s*_]{0,8}$|\(([A-Z])\)",
    re.MULTILINE,
)


def choice(completion: Completion) -> float:
    """Whether the letter that was chosen is the label's. Raises ValueError for a label that is no letter.

    The letter is what is boxed, tagged or marked ("the answer is B"), or the text begins with if it is one line; else
    what the text says last ("B is correct", a line "B", "(B)").
    """
    wanted = {letter for label in accepted_labels(completion.label) if (letter := _letter(label))}
    if not wanted:
        raise ValueError(f"the label {completion.label[:80]!r} is not the letter of a choice")
    answer = read_answer(completion.text)
    letter = _letter(answer.text) if answer.is_marked or "\n" not in answer.text else ""
    if not letter and not answer.is_marked:
        said = deque(SAID_CHOICE.finditer(answer.text[-TAIL_CHARS:]), maxlen=1)
        letter = next((group for one in said for group in one.groups() if group), "")
    return float(letter in wanted)


def _letter(text: str) -> str:
    found = CHOICE.fullmatch(text[:MAX_CHARS])
    return (found[1] or found[2]).upper() if found is not None else ""


def workflow(completion: Completion) -> float:
    """What the workflow said that its sample is worth. Raises ValueError if it said nothing."""
    if completion.reward is None:
        raise ValueError("the workflow said no reward; it does so by `return ctx.episode.sample(reward=...)`")
    return completion.reward


def recorded(completion: Completion) -> float:
    """What the answer was given when it was recorded. Raises ValueError if it was not."""
    recorded: object = completion.metadata.get("recorded")
    rewards = cast("dict[str, list[float]]", recorded).get("rewards", []) if isinstance(recorded, dict) else []
    if completion.index >= len(rewards):
        raise ValueError('of this answer no reward is recorded; data.preset = "recorded" reads those of dumps')
    return rewards[completion.index]


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
RECORDED = "recorded"
BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin(exact, reads_answer=True),
    "numeric": Builtin(numeric, reads_answer=True),
    "math": Builtin(math_equal, seconds=SECONDS, prepare=prepare, reads_answer=True),
    "f1": Builtin(f1, reads_answer=True),
    "choice": Builtin(choice, reads_answer=True),
    "regex": Builtin(regex, takes_pattern=True, reads_answer=True),
    "format": Builtin(text_format, takes_pattern=True),
    WORKFLOW: Builtin(workflow),
    RECORDED: Builtin(recorded),
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
    given = dict(args or {})
    if pattern and builtin.takes_pattern:
        given["pattern"] = pattern
    fn = bind(builtin.fn, given, key=key, what=f'reward "{name}"')
    is_stripped = strip_thinking and builtin.reads_answer and "think" not in pattern
    return partial(_after_thought, fn) if is_stripped else fn


def _after_thought(fn: RewardFunction, completion: Completion) -> RewardValue:
    text = after_thought(completion.text, begins_inside=completion.begins_in_thought)
    return 0.0 if text is None else fn(msgspec.structs.replace(completion, text=text))


def as_the_only_one(fn: RewardFunction, name: str) -> RewardFunction:
    """A built-in that alone judges: it would silently overrule the reward of the workflow."""
    return fn if name in (WORKFLOW, RECORDED) else partial(_judged_by_text, fn, name)


def _judged_by_text(fn: RewardFunction, name: str, completion: Completion) -> RewardValue:
    if completion.reward is not None:
        raise ValueError(
            f'the workflow said a reward, and reward.fn = "{name}" does not heed it; set reward.fn = "{WORKFLOW}"'
        )
    return fn(completion)
