r"""Finding the answer in an answer text, and reading numbers: the one reader for all built-in rewards.

What is thought is left out first (`after_thought`). Of the rest the answer is what is boxed last; else what follows
the last marker ("####", "the answer is", "Answer:"); else what the last `<answer>` tag holds; else the whole text. The
first three are marked: the author says that this is the answer, all of it.

Pure and linear in the length of the text: model output is hostile input.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

import msgspec

BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
TAG = re.compile(r"<(?P<close>/)?(?:final_?)?(?:answer|solution)>", re.IGNORECASE)

_THINK = r"think|thinking|thought|reasoning|seed:think"
THOUGHT_END = re.compile(rf"</(?:{_THINK})>|\[/THINK\]|<\|end_of_thought\|>", re.IGNORECASE)
THOUGHT_BEGIN = re.compile(rf"<(?:{_THINK})>|\[THINK\]|<\|begin_of_thought\|>", re.IGNORECASE)

MARKER = re.compile(
    r"(?P<hash>####)|\banswer[\"*_]{0,4}(?:\s(?:to|for|of)\b[^.\n:=?!]{0,60}?)?"
    r"(?:\s(?:is|must be|should be|would be)\b:?|[\"*_\s]{0,4}[:=：]|[*_]{0,2}\n)"
    r"|(?:答案|答え|정답)\s?(?:是|为|は|은|[:：])|故选",
    re.IGNORECASE,
)
MARKED_CHARS = 20_000
"""A marker is looked for in so much of the end of a text."""
_LEAD = re.compile(r"(?:[\"*_:：\s]|\\\[|\$\$)*")
CLAUSE_END = re.compile(
    r"[.;!?](?=[*_\s]|$)|[。；！？]|\\\]|\$\$|\s\((?=[A-Za-z]{2})|,?\s(?:because|since|so|which|not|as|by)\b"
)


@dataclass(frozen=True, slots=True)
class JudgedText:
    """What is judged."""

    text: str
    is_marked: bool
    """It is said to be the answer, so all of it is judged; else the answer is somewhere in it, near its end."""


def opens_thought(prompt: str) -> bool:
    """Whether the text that was given to the model ends inside a thought that it has just begun."""
    begun = deque(THOUGHT_BEGIN.finditer(prompt), maxlen=1)
    return bool(begun) and not prompt[begun[0].end() :].strip()


def after_thought(text: str, *, begins_inside: bool = False) -> str | None:
    """What follows the last end of a thought; None if a thought does not end, for then there is no answer yet.
    `begins_inside`: the prompt began one."""
    ended = deque(THOUGHT_END.finditer(text), maxlen=1)
    if begins_inside and not ended:
        return None
    rest = text[ended[0].end() :] if ended else text
    return None if THOUGHT_BEGIN.search(rest) else rest


def accepted_labels(label: str) -> tuple[str, ...]:
    """The answers that a row accepts: those of a list with texts in it, which data writes as JSON, or of verl's
    `{"target": [...]}`; else the label itself."""
    try:
        if label.startswith('{"target":'):
            found = msgspec.json.decode(label, type=dict[str, list[str] | str])["target"]
            return (found,) if isinstance(found, str) else tuple(found) or (label,)
        if label.startswith("[") and '"' in label:  # without texts it may be an interval
            return tuple(str(one) for one in msgspec.json.decode(label, type=list[str | int | float])) or (label,)
    except (msgspec.DecodeError, KeyError):
        pass
    return (label,)


def boxed(text: str) -> str | None:
    r"""Content of the `\boxed{...}` that closes last, braces balanced; None without one."""
    found: str | None = None
    opened: list[int] = []  # where the contents of each open brace begin; -1 for a brace that is not a box's
    for match in BRACES.finditer(text):
        if match[1]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start >= 0:
                found = text[start : match.start()]
    return found.strip() if found is not None else None


def in_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`; None without one."""
    found: str | None = None
    opened = -1
    for tag in TAG.finditer(text):
        if not tag["close"]:
            opened = tag.end()
        elif opened >= 0:
            found, opened = text[opened : tag.start()], -1
    return found.strip() if found is not None else None


def after_marker(text: str) -> str | None:
    """What follows the last marker: after `####` the rest of the line, after words the rest of the clause; None without
    a marker."""
    said = deque(MARKER.finditer(text, max(len(text) - MARKED_CHARS, 0)), maxlen=1)
    if not said:
        return None
    rest = text[said[0].end() :]
    line = rest[_LEAD.match(rest).end() :].partition("\n")[0]  # pyright: ignore[reportOptionalMemberAccess]
    if (tag := TAG.search(line)) is not None:
        line = line[: tag.start()]
    if not said[0]["hash"]:
        line = CLAUSE_END.split(line, maxsplit=1)[0]
    return line.strip(' *_"')


def read_answer(text: str) -> JudgedText:
    """See the module's head."""
    for read in (boxed, after_marker, in_tag):
        if (found := read(text)) is not None:
            return JudgedText(found, is_marked=True)
    return JudgedText(text.strip(), is_marked=False)


MAX_CHARS = 400
"""A longer text is no number that was meant; it would only cost memory."""
TAIL_CHARS = 20_000
"""In running text, so much of the end is looked at."""
_SPELLINGS = tuple((re.compile(pattern), instead) for pattern, instead in (
    ("[\u2212\u2013\u2010\u2011]", "-"), ("[\u00a0\u2009\u202f]", " "),
    (r"\\(?:left|right|displaystyle|boxed|text|mathrm|mathbf|textbf)\b|\\[!,;:() \[\]$]|[{}]\s?,\s?[{}]|[$*`\"]", " "),
    (r"\\[dtc]?frac\s?(?:\{([^{}]{1,99})\}|(\d))\s?(?:\{([^{}]{1,99})\}|(\d))", r" \1\2/\3\4"),
    (r"(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?\{?([-+]?\d{1,3})\}?", r"e\1"),
    (r"[{}]", " "), (r"(?<=\d)\s*,\s*(?=\d{3}(?!\d))|(?<=\d) (?=\d{3}(?!\d))|(?<=[-+]) (?=\d)|(?<=\d) (?=e[-+\d])", ""),
))  # fmt: skip
_DECIMAL = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d{1,3})?"
_UNIT = (
    r"[€£¥°]|\^\s*\\circ"
    r"|\s(?!(?:or|and|to|not|hundred|thousand|million|billion|trillion|dozen)\b)[^\W\d][^\d=<>!+^]{0,40}(?:\^\s*[23])?"
)
_NUMBER = re.compile(
    r"(?:[A-Za-z][\w ()]{0,40}=)?\s*[€£¥]?\s*(?:(?P<whole>[-+]?\d+) +(?=\d+/))?"
    rf"(?P<top>{_DECIMAL})(?:/(?P<low>{_DECIMAL}))?(?P<percent>\s*\\?%|\s+percent)?(?:\s*(?:{_UNIT}))?\s*[.,;]?\s*",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[-+])?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d*)?(?:e[-+]?\d{1,3})?(?:/\d+)?%?(?!\w)",
    re.IGNORECASE,
)


def numbers_of(text: str) -> tuple[Fraction, ...]:
    """The one number that the whole text is, exactly, a unit behind it and `x =` before it aside; () for none. 50 % is
    50, and also 0.5."""
    if len(text) > MAX_CHARS:
        return ()
    for pattern, instead in _SPELLINGS:
        text = pattern.sub(instead, text)
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return ()
    try:
        value = Fraction(found["top"]) / Fraction(found["low"] or 1)
    except ZeroDivisionError:
        return ()
    if found["whole"]:
        value = Fraction(found["whole"]) + (-value if found["whole"].startswith("-") else value)
    return (value, value / 100) if found["percent"] else (value,)


def last_number(text: str) -> tuple[Fraction, ...]:
    """As `numbers_of`: of the last number in running text."""
    tail = _SPELLINGS[0][0].sub("-", text[-TAIL_CHARS:])
    found = deque(_IN_TEXT.finditer(tail), maxlen=1)
    return numbers_of(found[0][0].rstrip(".")) if found else ()
