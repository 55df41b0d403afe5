"""Rewards that compare words: how much of the answer is the label, and which letter was chosen.

Pure and linear in the length of the text: model output is hostile input.
"""

from __future__ import annotations

import re
import string
from collections import Counter, deque

from ...core.completions import Completion
from .extraction import accepted_labels, after_marker, boxed, in_tag, read_answer
from .numbers import FULL_WIDTH

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
VERDICTS = frozenset({"yes", "no", "noanswer"})
"""Half of one of these is worth nothing."""

_BARE = r"(?:[\s*_$`\"'(\[{（【「]|\\[(\[]){0,8}"
_MACRO = r"(?:\\[a-z]{4,6}\s?\{)?"
_END = r"[\s*_$`\"'\])}）】」.:：\\]"
# An answer that is a letter, or begins with one set apart: "B", "(b)", "\text{B}", "**B.**", "B) Paris".
CHOICE = re.compile(
    rf"{_BARE}{_MACRO}{_BARE}([A-Za-z]){_END}*,?(?:(?<=[).:,\]}}*）】：])(?!\s*[A-Z]{_END}*$).*)?", re.DOTALL
)
_ALONE = r"(?![\w'’-])"
_APART = r"(?![A-Za-z0-9_'’])"
"""A letter of another script may follow."""
_IS = r"(?i:\s{1,4}(?:is|was|must be|should be|would be|has to be|will be|to pick is|(?:seems|appears)(?: to be)?))"
# In running text, where a small letter may be a word, and "I" too: "the answer is (B)", "Answer: **B**", "B is right".
_STATES = r"(?:is|does|has|cannot|says|states|describes|refers|suggests|implies|mentions|involves)\b"
_ANSWER_IS = (
    rf"\b(?!(?i:option|choice)\s{{1,2}}{_BARE}[A-Z][)\]*]{{0,4}}\s{_STATES})"  # what `_IS_CORRECT` finds aside
    r"(?i:answer|option|choice|pick|selection|solution|letter)"
    r"(?i:\s{1,4}(?:here|therefore|then|letter|choice|option|to this question))?"
    rf"(?:{_IS})?(?:\s{{0,4}}[:=：]|\s{{1,4}}[-–—]{{1,3}}(?=\s))?{_BARE}{_MACRO}{_BARE}"
    rf"(?:(?i:option|choice|letter)\s{{1,2}}{_BARE})?"
    rf"(?:(?!I\s[a-z])([A-Z]){_ALONE}|([a-z]){_END}{{0,8}}(?=$|\n|[.,;!?])"
    rf"|([b-hj-z]){_ALONE}(?=[^a-z\n]{{0,4}}\s(?:because|since|as)\b))"
)
_IS_CORRECT = (
    r"(?<![\w'])[(\[]?([A-Z])[)\]]?[*_]{0,2}\s(?:is|must be|would be|seems|looks)\s"
    r"(?:(?:the|a|most|likely|indeed|clearly|therefore|thus|probably|definitely|also|our|my|only|final|single)\s){0,3}"
    r"(?:correct|right|true|best|most \w{1,20}|the answer|answer|appropriate|accurate|valid)\b"
)
_IT_IS = (
    r"\b(?i:it['’]s|it is|it must be|it should be|going with|choos(?:e|ing)|select(?:ing)?|pick(?:ing)?"
    r"|(?:i|i['’]d|i['’]ll|i would|i will|we)\s(?:say|go with|guess|answer)|therefore,?|thus,?|hence,?|so,?)"
    rf"(?i:\s(?:option|choice|letter))?:?\s{_BARE}([A-Z])"
    rf"(?={_END}{{0,8}}(?:$|\n|[.,;:!?]|\s(?:because|since|as|so|which|for|here)\b))"
)
# What the markers of answers leave over.
_IN_OTHER_LANGUAGES = (
    rf"(?:[选選][项項择擇]?|答え|正解|정답)\s?(?:应为|是|为|為|は|が|은|는|이)?\s?[:：]?{_BARE}([A-Za-z]){_APART}"
    r"|\b(?i:antwort|r[ée]ponse|respuesta|resposta|risposta|antwoord|lösung)(?i:\s(?:correc?t[ae]|richtige|finale?|exacte"
    rf"|ist|lautet|est|es|é|è|is|la|die|a|de|option|opción|opção)){{0,5}}\s?:?\s?{_BARE}([A-Z]){_ALONE}"
)
SAID = re.compile("|".join((_ANSWER_IS, _IS_CORRECT, _IT_IS, _IN_OTHER_LANGUAGES)))
# Two letters are none: "A or B".
HEDGED = re.compile(
    rf"{_END}{{0,4}}\s?(?:,|/|&|or|and|oder|ou|或|和|、)\s?{_BARE}[A-Z](?={_END}{{0,8}}(?:$|\n|[.,;:!?]|(?:or|and)\b))"
)
BOTH = re.compile(
    rf"{_BARE}(?:{_MACRO}{_BARE}[A-Z]{_END}{{0,4}}(?:,|/|&|or|and|\s){{1,3}}\s?){{1,8}}{_BARE}{_MACRO}[A-Z]{_END}*"
)
ALONE = re.compile(r"^[\s*_]{0,8}\(?([A-Z])\)?[.:]?[\s*_]{0,8}$", re.MULTILINE)
IN_PARENTHESES = re.compile(r"\(([A-Z])\)")
MAX_MARKED_CHARS = 200
TAIL_CHARS = 20_000
"""In running text, so much of the end is looked at."""


def f1(completion: Completion) -> float:
    """Harmonic mean of precision and recall of the answer's words, each counted as often as it occurs; case,
    punctuation and articles aside (the measure of SQuAD). Yes and no are right or wrong."""
    answer = _words(read_answer(completion.text).text)
    return max(_overlap(answer, _words(label)) for label in accepted_labels(completion.label))


def choice(completion: Completion) -> float:
    """Whether the letter that was chosen is the label's. Raises ValueError for a label that is no letter.

    The letter is what is boxed, tagged or marked; else what the text says last of the answer ("the answer is B", "B is
    correct"); else its last line that is a letter, the letter that it begins with if it is one line, its last letter in
    parentheses. Who names two has chosen none.
    """
    letters = {letter for label in accepted_labels(completion.label) if (letter := _letter(label)) is not None}
    if not letters:
        raise ValueError(f"the label {completion.label[:80]!r} is not the letter of a choice")
    return float(_chosen_letter(completion.text.translate(str.maketrans(FULL_WIDTH))) in letters)


def _overlap(answer: list[str], label: list[str]) -> float:
    if answer == label:
        return 1.0
    if not answer or not label or VERDICTS & {" ".join(answer), " ".join(label)}:
        return 0.0
    shared = (Counter(answer) & Counter(label)).total()
    return 2 * shared / (len(answer) + len(label))


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _letter(text: str | None) -> str | None:
    match = CHOICE.fullmatch(text) if text is not None else None
    return match[1].upper() if match else None


def _chosen_letter(text: str) -> str | None:
    box = boxed(text)
    for marked in (box, in_tag(text), after_marker(text)):
        if marked is not None and len(marked) <= MAX_MARKED_CHARS and BOTH.fullmatch(marked):
            return None
        if (letter := _letter(marked)) is not None:
            return letter
    tail = text[-TAIL_CHARS:]
    if (matches := deque(SAID.finditer(tail), maxlen=1)) and (match := matches[0]):
        letter = next(group for group in match.groups() if group is not None)
        return None if HEDGED.match(tail, match.end(match.lastgroup or 0)) else letter.upper()
    if (alone := _last(ALONE, tail)) is not None:
        return alone
    line = text.strip()
    if "\n" not in line and (letter := _letter(line)) is not None:
        return letter
    return _last(IN_PARENTHESES, tail)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0][1] if matches else None
