"""Finding the answer in an answer text, for all built-in rewards: the one reader of answers.

What is thought is left out first (`after_thought`). Of the rest the answer is what is boxed last; else what follows
the last marker ("####", "the answer is", "Answer:"); else what the last `<answer>` tag holds; else the whole text. The
first three are marked: the author says that this is the answer, all of it.

Pure and linear in the length of the text: model output is hostile input.
"""

from __future__ import annotations

import ast
import re
import textwrap
import unicodedata
from collections import deque
from dataclasses import dataclass

import msgspec

TOKENS = re.compile(r"((?<!\\)\\++(?:boxed|fbox|framebox)\s*\{)|\\boxed\s+([^\s{}$]+)\s*\$|\\.|[{}]", re.DOTALL)
PARTED = re.compile(r"[\s$]*(?:[,;]|(?:[,;]\s*)?(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b))[\s$]*")
MARKER = "####"
"""What GSM8K writes in front of the final answer."""
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?:<\w{1,20}>)?(?P<ticks>`{3,}|~{3,})(?P<kind>[^\n`]*)(?:\n|$)", re.MULTILINE)
PYTHON = re.compile(r"\W*(?:(?P<name>py)|$)", re.IGNORECASE)
"""What a fence says of a block that may be Python; others are commands, outputs and the like."""
DEFINES = re.compile(r"^\s*(?:async )?(?:def|class) ", re.MULTILINE)
CLOSES = re.compile(r"\s*(?:</\w{1,20}>\s*)?")
MAX_MORE_INDENT = 3
"""A closing fence may be indented so much more than its opening one; in a docstring it is more."""
TAG = re.compile(r"<(?P<close>/)?(?:final_?)?(?:answer|solution)>", re.IGNORECASE)

_THINK = r"think|thinking|thought|reasoning|seed:think"
THOUGHT_END = re.compile(rf"</(?:{_THINK})>|\[/THINK\]|<\|end_of_thought\|>", re.IGNORECASE)
THOUGHT_BEGIN = re.compile(rf"<(?:{_THINK})>|\[THINK\]|<\|begin_of_thought\|>", re.IGNORECASE)

_BE = r"(?:is|are|was|equals|(?:would|will|must|should|can only|has to) be)"
_NO_ANSWER = r"(?!\s?(?:correct|right|wrong|incorrect|clear|obvious|found|based|derived|obtained|above)\b)"
_SEPARATOR = (
    rf"[\"'*_\s]{{0,4}}(?:\b{_BE}\b(?:\s(?:as follows|the following))?{_NO_ANSWER}\s?:?|[:=：]|\s[-–—]{{1,3}}\s)"
)
_ABOUT = r"(?:\s+(?:to|for|of|in|here|choice|option|letter|therefore|then|thus|key)\b[^.\n:=?!]{0,60}?)?"
_OTHERS = (
    r"\b(?:antwort|r[ée]ponse|respuesta|resposta|risposta|antwoord|odpowied[źz]|cevap)\b"
    r"(?:\s+(?:correct[ae]|finale?|final|richtige))?"
    r"[*_\s]{0,4}(?:\b(?:ist|lautet|est|es|é|è|to|is)\b\s?:?|[:=：])|ответ[*_\s]{0,4}(?:[:=—–-]|это\b)"
    r"|(?:答案|答え|解答|正解|答)[*_\s]{0,4}(?:应该是|應該是|应为|應為|是|为|為|は|[:：=])\s?[:：]?"
    r"|(?:정답|답)[*_\s]{0,4}(?:은|는|[:：=])"
    r"|đáp án[*_\s]{0,4}(?:là|:)|الجواب[*_\s]{0,4}(?:هو|:)|उत्तर[*_\s]{0,4}(?:है|:)"
)
_HEADING = r"^[#*_\s]{0,8}(?:the )?(?:final |correct )?answer[*_:\s]{0,6}$"
_SECTION = r"(?:step|part|case|conclusion|solution|explanation|summary|verification|calculation|method)\b"
SAID = re.compile(
    rf"{_HEADING}|(?P<hash>{MARKER}(?!#|\s?{_SECTION}))"
    rf"|\banswers?(?:\s?\([^()\n]{{0,40}}\))?{_ABOUT}{_SEPARATOR}|{_OTHERS}",
    re.IGNORECASE | re.MULTILINE,
)
MARKED_CHARS = 20_000
"""A marker is looked for in so much of the end of a text."""
MAX_CLAUSE_CHARS = 2000
"""How far the end of a clause is looked for."""
CLAUSE_END = re.compile(
    r"[.;!?](?=[*_\s]|$)|[。；！？]"
    r"|\s\((?=[A-Za-z]{2})|,\s(?:not|i\.e\.|that is|namely|but not|and not)(?=[\s,])"
    r"|,\s(?:in|for|on|at|with|giving|making|altogether|after|before|assuming|rounded)(?=[\s,.])"
    r"|,?\s(?:because|since|as|so|which|where|when|hence|thus|therefore|if|by|using|given|due)\b"
)
LEADING = re.compile(
    r"(?:that|indeed|exactly|simply|just|clearly|therefore|thus|then|hence|equal to|given by"
    r"|approximately|about|roughly)\b[:,]?\s{0,4}",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class JudgedText:
    """What is judged."""

    text: str
    is_marked: bool
    """It is said to be the answer, so all of it is judged; else the answer is somewhere in it, near its end."""


def opens_thought(prompt: str) -> bool:
    """Whether the text that was given to the model ends inside a thought that it has just begun."""
    openings = deque(THOUGHT_BEGIN.finditer(prompt), maxlen=1)
    return bool(openings) and not prompt[openings[0].end() :].strip()


def after_thought(text: str, *, begins_inside: bool = False) -> str | None:
    """What follows the last thought; None: it does not end. `begins_inside`: the prompt began one."""
    ended = deque(THOUGHT_END.finditer(text), maxlen=1)
    if begins_inside and not ended:
        return None
    answer = text[ended[0].end() :] if ended else text
    return None if THOUGHT_BEGIN.search(answer) else answer


def accepted_labels(label: str) -> tuple[str, ...]:
    """The answers that a row accepts: those of a list with texts in it, which data writes as JSON, or of verl's
    `{"target": [...]}`; else the label itself."""
    listed = label = unicodedata.normalize("NFC", label)
    if label.startswith('{"target":'):
        try:
            listed = bytes(msgspec.json.decode(label, type=dict[str, msgspec.Raw])["target"]).decode()
        except (msgspec.DecodeError, KeyError):
            return (label,)
        listed = listed if listed.startswith("[") else f"[{listed}]"
    return _texts_of(listed) or (label,)


def labels_of_numbers(label: str) -> tuple[str, ...]:
    """The same where a label is a number: `[7,8]`, which is an interval for others, is a list too."""
    return _texts_of(label, may_be_numbers=True) or accepted_labels(label)


def _texts_of(listed: str, *, may_be_numbers: bool = False) -> tuple[str, ...]:
    if not listed.startswith("[") or ('"' not in listed and not may_be_numbers):
        return ()
    try:
        raw = [bytes(entry).decode() for entry in msgspec.json.decode(listed, type=list[msgspec.Raw])]
        return tuple(msgspec.json.decode(entry, type=str) if entry.startswith('"') else entry for entry in raw)
    except msgspec.DecodeError:
        return ()


def boxed(text: str) -> str | None:
    r"""Content of the `\boxed{...}` that closes last and holds something, braces balanced; of several that only commas
    or "and" part, of all; None without any box."""
    opened: list[tuple[int, int]] = []  # begin and contents of each open brace; -1 for a brace that is not a box's
    boxes: list[tuple[int, int, int, int]] = []  # begin and end, of it and of its content
    for match in TOKENS.finditer(text):
        if match[1]:
            opened.append((match.start(), match.end()))
        elif match[2]:
            boxes.append((*match.span(), *match.span(2)))
        elif match[0] == "{":
            opened.append((match.start(), -1))
        elif match[0] == "}" and opened and (box := opened.pop())[1] >= 0:
            boxes.append((box[0], match.end(), box[1], match.start()))
    contents: list[str] = []
    begin = len(text)
    for start, end, first, last in reversed(boxes):
        if contents and not (end <= begin and PARTED.fullmatch(text, end, begin)):
            break
        if content := text[first:last].strip():
            contents.append(content)
            begin = start
    return ", ".join(dict.fromkeys(reversed(contents))) if contents else "" if boxes else None


def after_marker(text: str) -> str | None:
    """What follows the last marker: after `####` the rest of the line, after words the rest of the clause; None without
    a marker. Where that is empty, the next line that is not, or the displayed formula."""
    return _text_after(text, marker) if (marker := _last_marker(text)) is not None else None


def in_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`; None without one."""
    content: str | None = None
    opened = -1
    for tag in TAG.finditer(text):
        if not tag["close"]:
            opened = tag.end()
        elif opened >= 0:
            content, opened = text[opened : tag.start()], -1
    return content.strip() if content is not None else None


def fenced_code(text: str, *, is_called: bool = False) -> str:
    """What the last fenced block of Python holds, or the last of any kind, up to the end where it is not closed;
    without one, the whole text. `is_called`: of several the last that defines something, for others show its use."""
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif (
            fence["ticks"].startswith(opening["ticks"])
            and CLOSES.fullmatch(fence["kind"])
            and len(fence["indent"]) <= len(opening["indent"]) + MAX_MORE_INDENT
        ):
            blocks.append((opening["kind"], text[opening.end() : fence.start()]))
            opening = None
    if opening is not None:
        blocks.append((opening["kind"], text[opening.end() :]))
    codes = [(PYTHON.match(kind), textwrap.dedent(code)) for kind, code in blocks]
    is_named = any(kind and kind["name"] for kind, _ in codes)
    python = [code for kind, code in codes if kind and (kind["name"] or not is_named or _does(code))]
    found = python or [code for _, code in codes] or [text]
    return next(filter(DEFINES.search, reversed(found if is_called else ())), found[-1])


def _does(code: str) -> bool:
    """Whether it is Python that does something: the output of a program may be Python too."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(node, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(node)) for node in body
    )


def read_answer(text: str) -> JudgedText:
    """See the module's head."""
    text = unicodedata.normalize("NFC", text)  # as models write: an accent is one sign with its letter
    answer = _find_marked(text)
    return JudgedText(text.strip(), is_marked=False) if answer is None else JudgedText(answer, is_marked=True)


def answer_of_label(label: str) -> str:
    """What a label, which may be a whole solution, marks as the answer; else all of it."""
    answer = read_answer(label)
    return answer.text if answer.is_marked else label.strip()


def _find_marked(text: str) -> str | None:
    if box := boxed(text):
        return box
    marker = _last_marker(text)
    if marker is None:
        return in_tag(text) or box
    later = in_tag(text[marker.start() :]) if not marker["hash"] else None
    return later if later is not None else _text_after(text, marker)


def _last_marker(text: str) -> re.Match[str] | None:
    matches = deque(SAID.finditer(text, max(len(text) - MARKED_CHARS, 0)), maxlen=1)
    return matches[0] if matches else None


def _text_after(text: str, marker: re.Match[str]) -> str:
    answer = text[marker.end() :]
    if marker["hash"]:
        line = answer.strip().partition("\n")[0].strip()
        tag = TAG.search(line)
        return line[: tag.start()].strip() if tag is not None else line
    answer = answer.lstrip("}*_: \t\r\n：")
    if text[: marker.start()].endswith('"'):  # {"answer": 42}
        return answer.partition("\n")[0].strip('", }')
    if (tag := TAG.search(answer)) is not None:
        answer = answer[: tag.start()]
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if answer.startswith(opening) and (end := answer.find(closing, len(opening))) >= 0:
            return answer[len(opening) : end].strip()
    clause = _clause(answer.partition("\n")[0])
    while (lead := LEADING.match(clause)) is not None:
        clause = clause[lead.end() :]
    return clause.strip().strip("*_").strip()


def _clause(line: str) -> str:
    """Up to where something else is said, outside formulas."""
    for end in CLAUSE_END.finditer(line[:MAX_CLAUSE_CHARS]):
        before = line[: end.start()]
        if before.count("$") % 2 == 0 and before.count("\\(") == before.count("\\)"):
            return before
    return line
