"""Rewards that compare words: how much of the answer is the label, and which letter was chosen.

Pure and linear in the length of the text: model output is hostile input.
"""

from __future__ import annotations

import re
import string
from collections import Counter, deque

from ...core.completions import Completion
from .extraction import Extract, after_marker, boxed, extract, in_tag, last_line

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
VERDICTS = frozenset({"yes", "no", "noanswer"})
"""Half of one of these is worth nothing."""

END_OF_THOUGHT = "</think>"
_BARE = r"(?:[\s*_$`\"'(\[{]|\\[(\[]){0,8}"
_MACRO = r"(?:\\[a-z]{4,6}\s?\{)?"
# An answer that is a letter, or begins with one that stands apart: "B", "(b)", "\text{B}", "**B.**", "B) Paris".
CHOICE = re.compile(rf"{_BARE}{_MACRO}{_BARE}([A-Za-z])[\s*_$`\"'\])}}.:\\]*(?:(?<=[).:\]}}*]).*)?", re.DOTALL)
# In running text, where a small letter may be a word, and "I" too: "the answer is (B)", "Answer: **B**".
SAID = re.compile(
    r"\b(?i:answer|option|choice)(?i:\s{1,4}is)?\s{0,4}[:=]?"
    rf"{_BARE}{_MACRO}{_BARE}(?!I\s[a-z])([A-Z])(?![\w'])"
)
ALONE = re.compile(r"^[\s*_]{0,8}\(?([A-Z])\)?[.:]?[\s*_]{0,8}$", re.MULTILINE)
IN_PARENTHESES = re.compile(r"\(([A-Z])\)")


def f1(completion: Completion, *, extract_from: Extract = "auto") -> float:
    """Harmonic mean of precision and recall of the answer's words, each counted as often as it occurs; case,
    punctuation and articles aside (the measure of SQuAD). Yes and no are right or wrong."""
    answer = extract(completion.text, extract_from)
    given, wanted = _words(answer or ""), _words(completion.label)
    if given == wanted:
        return 1.0
    if not given or not wanted or VERDICTS & {" ".join(given), " ".join(wanted)}:
        return 0.0
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted))


def choice(completion: Completion) -> float:
    """Whether the letter that was chosen is the label's. Raises ValueError for a label that is no letter.

    The letter is what is boxed, tagged or marked; else what the text after the last `</think>` says last of the answer
    ("the answer is B"); else its last line that is a letter, the letter that it begins with if it is one line, its last
    letter in parentheses.
    """
    wanted = _letter(completion.label)
    if wanted is None:
        raise ValueError(f"the label {completion.label[:80]!r} is not the letter of a choice")
    return float(_chosen(completion.text.rpartition(END_OF_THOUGHT)[2]) == wanted)


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _letter(text: str | None) -> str | None:
    found = CHOICE.fullmatch(text) if text is not None else None
    return found[1].upper() if found else None


def _chosen(text: str) -> str | None:
    for marked in (boxed(text), in_tag(text), after_marker(text)):
        if (letter := _letter(marked)) is not None:
            return letter
    if (said := _last(SAID, text) or _last(ALONE, text)) is not None:
        return said
    line = last_line(text)
    if line is not None and line == text.strip() and (letter := _letter(line)) is not None:
        return letter
    return _last(IN_PARENTHESES, text)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0][1] if found else None
