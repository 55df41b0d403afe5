"""The arguments that a shell script, a plain list or a Hydra config gives a training program. The file is read, never
run: however confined, a shell can end processes and open connections as its user.

Of a script: words, quotes, arrays, assignments, `$NAME`, `${NAME:-default}` and sums of whole numbers. What a block, a
command, another file or the caller would decide stays in the value as it is written, a *gap*; `remarks` say where.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...core.errors import ConfigError
from ...core.files import read_regular

MAX_BYTES = 1 << 18
"""Of a file."""
MAX_GROWN = 1 << 22
"""Letters that the values of variables may add in all."""
MAX_ARGUMENTS = 2000
MAX_DEPTH = 8
COMMAND = "${...}"
"""In place of what a command prints."""
SPLIT = "\x1f"
"""Between the words of a value without quotes."""
PREFIX = "actor_rollout_ref."
"""Of most of verl's keys; taken away."""


def _nested(opens: str, closes: str) -> str:
    """A pattern, without backtracking, of text between these two, which may hold pairs of them."""
    inner = plain = rf"(?:[^{opens}{closes}]++)"
    for _ in range(MAX_DEPTH):
        inner = rf"(?:{plain}|\{opens}{inner}*+\{closes})"
    return rf"\{opens}{inner}*+\{closes}"


DOLLAR = rf"\${_nested('(', ')')}|`[^`]*`|\${_nested('{', '}')}|\$\w+|\$[@*?!$-]|\$(?![({{])"
PIECE = rf"""'[^']*'|"(?:[^"\\$`]++|\\.|{DOLLAR})*+"|{DOLLAR}|\\."""
WORD = rf"""(?:{PIECE}|[^\s;&|()<>'"`$\\])"""
SPACE = r"(?:[ \t]|\\\n)+|(?<![^\s;&|()])\#[^\n]*"
TOKEN = re.compile(
    rf"""{SPACE}|function[ \t]+\w+(?=[ \t(])|\d*&?(?:<<<|>>|[<>](?!<))&?[ \t]*{WORD}*+
    |<<-?[ \t]*['"]?(?P<here>[A-Za-z]\w*)[^\n]*+(?:\n(?![ \t]*(?P=here)\n)[^\n]*+)*+\n[ \t]*(?P=here)(?=\n)
    |(?P<array>\w+\+?)=\((?P<body>(?:{SPACE}|\n|{WORD})*+)\)|(?P<end>[\n;&|()])|(?P<word>(?!\w+\+?=\(){WORD}++)""",
    re.VERBOSE | re.DOTALL,
)
"""What is between words (comments, redirections, here-documents), an array, the end of a statement, or a word."""
PIECES, IN_QUOTES = re.compile(PIECE, re.DOTALL), re.compile(rf"\\.|{DOLLAR}", re.DOTALL)
ALL_OF_ARRAY = re.compile(r""""?\$\{(\w+)\[[@*]\]\}"?""")
ALL_OF_CALLER = re.compile(r""""?\$(?:[@*]|\{[@*][^}]*\})"?""")
PARAMETER = re.compile(r"(\w+)(?:(:?)[-=](.*))?", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OPENS = ("if", "for", "while", "until", "case", "select")
DEPTHS = {
    **dict.fromkeys((*OPENS, "{"), 1), **dict.fromkeys(("fi", "done", "esac", "}"), -1),
    **dict.fromkeys(("then", "do", "else", "elif", "!", "exec", "time"), 0),
    **dict.fromkeys(("export", "declare", "local", "readonly"), 0),
}  # fmt: skip
"""Words before a command -> the blocks that they open."""
CHANGE = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:[-+*/%]?=|\+\+|--$)")
"""What `((...))` and an array's element set."""
DEVICES = "CUDA_VISIBLE_DEVICES"
OTHER_CODE = ("source", ".", "eval", "read", "unset", "mapfile", "readarray", "let")


def _quotient(a: int, b: int) -> int:
    """As a shell has it: towards 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


SUMS: dict[Any, Any] = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Div: _quotient}
FLAG = re.compile(r"--[A-Za-z]")
OVERRIDE = re.compile(r"\+{0,2}([\w@/-]+(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
SECRET = re.compile(r"(?i)(api|wandb|access|auth|admin)[-_.]?(api[-_.]?)?(key|token)|password|secret")
"""Names whose value is never shown or written."""
INTERPOLATION = re.compile(r"\$\{(?:actor_rollout_ref\.)?([\w.]+)\}")


class Argument(NamedTuple):
    """An argument, or a word of a script."""

    value: Any
    """True (a flag alone), a text or a list of texts; of Hydra what YAML makes of it."""
    line: int


@dataclass(slots=True)
class ScriptArguments:
    """What a file gives."""

    file: Path
    by_name: dict[str, Argument] = field(default_factory=dict[str, Argument])
    """By name; of several with one name the last, as the programs themselves take it."""
    remarks: list[str] = field(default_factory=list[str])
    program: str = ""
    """The training program, as the script calls it; empty for a list or a config."""
    num_entries: int = 0
    """Arguments, each time that they are given, and remarks."""

    def put(self, name: str, value: Any, line: int) -> None:
        name = name.removeprefix(PREFIX)
        if name in self.by_name:
            self.remark(line, f"{name} is given again: this one counts, as there")
        self._count(line)
        self.by_name[name] = Argument(value, line)

    def _count(self, line: int) -> None:
        self.num_entries += 1
        if self.num_entries > 2 * MAX_ARGUMENTS or len(self.by_name) >= MAX_ARGUMENTS:
            raise self.error(line, f"more than {MAX_ARGUMENTS} arguments, or remarks about them")

    def remark(self, line: int, sentence: str) -> None:
        self._count(line)
        self.remarks.append(f"line {line}: {hidden(sentence):.300}")

    def error(self, line: int, cause: str) -> ConfigError:
        remedy = "name the script, list of arguments or config that starts training"
        return ConfigError(f"{self.file}{f':{line}' if line else ''}: {cause:.300}", remedy=remedy)

    def text(self) -> str:
        """Of the file. Raises ConfigError."""
        try:
            text = read_regular(self.file, MAX_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(0, getattr(error, "strerror", None) or str(error)) from None
        if "\0" in text:
            raise self.error(0, "is binary")
        return text


def has_gap(value: object) -> bool:
    """Whether something in it is known where the script runs only."""
    return "${" in str(value)


def hidden(text: str) -> str:
    """Without what stands behind the name of a secret."""
    match = SECRET.search(text)
    return f"{text[: match.end()]} ..." if match else text


# -- shell scripts -----------------------------------------------------------------------------------------------------


class Script:
    """A shell script, statement by statement, with what its assignments say put in."""

    def __init__(self, arguments: ScriptArguments) -> None:
        self.arguments, self.text = arguments, arguments.text() + "\n"
        self.line, self.depth, self.grown = 1, 0, 0
        self.variables: dict[str, str] = {"HOME": "~"}
        self.arrays: dict[str, list[Argument]] = {}

    def commands(self) -> Iterator[list[Argument]]:
        """Words of each statement but its assignments, which are carried out. What is not done is remarked."""
        words: list[Argument] = []
        is_joined = False  # after && or ||: done or not
        for token in self._tokens(self.text):
            word = token["word"] or ""
            is_joined = token["end"] in ("&", "|") if token["end"] else is_joined
            assignment = ASSIGNMENT.match(word) if not words else None
            if not words and word in DEPTHS:
                self.depth = max(0, self.depth + DEPTHS[word])
                if word in OPENS:
                    self.arguments.remark(self.line, f"`{word}` is not run; what it sets is not known here")
            elif token["array"]:
                self._set_array(token["array"], token["body"], is_taken=not self.depth and not is_joined)
            elif assignment is not None:
                if assignment[1] == DEVICES:
                    self.arguments.remark(
                        self.line, f"{word}: name these GPUs in roles.*.devices, which count them all"
                    )
                before = self.variables.get(assignment[1], "") if assignment[2] else ""
                value = before + PIECES.sub(self._piece, word[assignment.end() :]).replace(SPLIT, " ")
                self.variables[assignment[1]] = (
                    f"${{{assignment[1]}}}" if self.depth or is_joined else self._counted(value)
                )
            elif word:
                words += self._words(word)
            elif token["end"] and words:
                yield words
                words = []

    def _tokens(self, text: str) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(text):
            token, line = TOKEN.match(text, position), self.line
            if token is None:
                raise self.arguments.error(line, "what begins here has no end, or is nested too deep")
            yield token
            position, self.line = token.end(), line + token[0].count("\n")

    def _set_array(self, name: str, body: str, *, is_taken: bool) -> None:
        if not is_taken:
            text = " ".join(body.split())
            self.arguments.remark(self.line, f"{name}=({text}) depends on what is not run: not taken")
            return
        words = [word for token in self._tokens(body) if token["word"] for word in self._words(token["word"])]
        if name[-1] == "+":
            self.arrays.setdefault(name[:-1], []).extend(words)
        else:
            self.arrays[name] = words

    def _words(self, text: str) -> list[Argument]:
        """Of one as it is written: none or several where a value without quotes, or an array, has so many."""
        if array := ALL_OF_ARRAY.fullmatch(text):
            words = self.arrays.get(array[1])
            if words is None:
                self.arguments.remark(self.line, f"the array {array[1]} is made in another file or a block: not read")
            self._counted("".join(word.value for word in words or []))
            return words or []
        if ALL_OF_CALLER.fullmatch(text):
            self.arguments.remark(self.line, f"{text} adds what the script's caller says: not known here")
            return []
        expanded = PIECES.sub(self._piece, text)
        return [Argument(piece, self.line) for piece in expanded.split(SPLIT) if expanded or text[0] != "$"]

    def _piece(self, match: re.Match[str]) -> str:
        text = match[0]
        if text[0] == '"':
            return IN_QUOTES.sub(self._value, text[1:-1])
        if text[0] in "'\\":
            return text.strip("'") if text[0] == "'" else text[1]
        return SPLIT.join(self._value(match).split())

    def _value(self, match: re.Match[str]) -> str:
        """Of `$...`; what the file does not say stays as it is written."""
        text = match[0]
        if text[0] == "\\":
            return "" if text[1] == "\n" else text[1] if text[1] in '"\\$`' else text
        if text[0] == "`" or text.startswith("$("):
            return self._sum(text[3:-2]) if text.startswith("$((") else COMMAND
        name = text[2:-1] if text.startswith("${") else text[1:]
        if name[:1] in ("@", "*"):
            self.arguments.remark(self.line, f"{text} adds what the script's caller says: not known here")
            return ""
        parameter = PARAMETER.fullmatch(name)
        value = self.variables.get(parameter[1]) if parameter else None
        if parameter and parameter[3] is not None and not (value or (value == "" and not parameter[2])):
            value = PIECES.sub(self._piece, parameter[3]).replace(SPLIT, " ")
            if parameter[0].startswith((f"{parameter[1]}:=", f"{parameter[1]}=")) and not self.depth:
                self.variables[parameter[1]] = value
        return self._counted(value) if value is not None else f"${{{name}}}" if name else "$"

    def _counted(self, value: str) -> str:
        self.grown += len(value)
        if self.grown > MAX_GROWN:
            raise self.arguments.error(self.line, "its variables grow without end")
        return value

    def _sum(self, text: str) -> str:
        """Of whole numbers, and of variables that hold some."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._counted(self.variables.get(match[1], "?")), text)
        try:
            tree = ast.parse(text if re.fullmatch(r"[\d\s()+*/-]{1,200}", text) else "", mode="eval")
            return str(_whole(tree.body))
        except (SyntaxError, AttributeError, LookupError, ArithmeticError):
            return COMMAND


def _whole(node: Any) -> int:
    if isinstance(node, ast.BinOp):
        return SUMS[type(node.op)](_whole(node.left), _whole(node.right))
    return node.value


def _words_for(program: re.Pattern[str], is_argument: re.Pattern[str], arguments: ScriptArguments) -> list[Argument]:
    """What the training program is called with; of a plain list the words of statements that begin with an argument."""
    script, call, plain = Script(arguments), list[Argument](), list[Argument]()
    for words in script.commands():
        index = next((number for number, word in enumerate(words) if program.search(word.value)), None)
        if words[0].value in OTHER_CODE or [word.value for word in words[1:2]] == ["in"]:
            script.variables |= {word.value: f"${{{word.value}}}" for word in words}
            arguments.remark(
                words[0].line, f"{' '.join(word.value for word in words):.80}: what that sets is not known"
            )
        elif change := CHANGE.match(" ".join(word.value for word in words)):
            script.variables[change[1]] = f"${{{change[1]}}}"
            arguments.remark(words[0].line, f"{change.string:.80}: what that sets is not known")
        elif index is None:
            plain += words if is_argument.match(words[0].value) else ()
        elif arguments.program:
            arguments.remark(words[0].line, f"a second call of {words[index].value}: not read")
        else:
            arguments.program, call = words[index].value, words[index + 1 :]
            if script.depth:
                arguments.remark(words[0].line, "the program is called within a block; taken as called once")
    return call if arguments.program else [*(word for words in script.arrays.values() for word in words), *plain]


# -- flags and overrides -----------------------------------------------------------------------------------------------


def read_flags(file: Path, program: re.Pattern[str]) -> ScriptArguments:
    """`--name value ...` of a script or list. Raises ConfigError."""
    arguments, name = ScriptArguments(file), ""
    for word, line in _words_for(program, FLAG, arguments):
        if FLAG.match(word):
            name, sign, value = word[2:].partition("=")
            arguments.put(name, [value] if sign else [], line)
        elif name:
            arguments.by_name[name].value.append(word)
        else:
            arguments.remark(line, f"{word} stands before any argument: not read")
    for name, (values, line) in arguments.by_name.items():
        arguments.by_name[name] = Argument(values if len(values) > 1 else values[0] if values else True, line)
    return arguments


def read_hydra(file: Path, program: re.Pattern[str]) -> ScriptArguments:
    """`key=value` of a script or list, or a YAML file's leaves by dotted key. Raises ConfigError."""
    arguments = ScriptArguments(file)
    if file.suffix in (".yaml", ".yml"):
        _put_yaml("", arguments.text(), 0, arguments)
        arguments.by_name.pop("", None)  # a file without keys
        if arguments.by_name.pop("defaults", None):
            arguments.remark(1, "defaults: the configs that Hydra would put together are not read")
    else:
        for word, line in _words_for(program, re.compile(r"[+~]{0,2}\w[\w@/-]*(\.[\w@/-]+)+="), arguments):
            override = OVERRIDE.fullmatch(word)
            if override is None or word.startswith("-"):
                arguments.remark(line, f"{word} sets no key, or names a config: not read")
            elif has_gap(override[2]):
                arguments.put(override[1], override[2], line)
            else:
                _put_yaml(override[1], override[2], line, arguments)
    for name, (value, line) in arguments.by_name.items():
        reference = INTERPOLATION.fullmatch(str(value))
        if reference and reference[1] in arguments.by_name:
            arguments.by_name[name] = Argument(arguments.by_name[reference[1]].value, line)
    return arguments


def _put_yaml(name: str, text: str, line: int, arguments: ScriptArguments) -> None:
    """Its leaves by dotted key."""
    loader: Any = yaml.SafeLoader

    def put(name: str, node: Any) -> None:
        if isinstance(node, yaml.MappingNode) and node.value:
            for key, inner in node.value:
                put(f"{name}.{key.value}".lstrip("."), inner)
        else:
            value = json.loads(json.dumps(loader("").construct_object(node, deep=True), default=str))
            arguments.put(name, value, line or node.start_mark.line + 1)

    if re.search(r"[\s,\[:]&\w", text) and re.search(r"[\s,\[:]\*\w", text):
        raise arguments.error(line, "anchors and aliases (&name, *name) are not read: write each value out")
    try:
        if node := loader(text or "null").get_single_node():
            put(name, node)
        else:  # a comment alone
            arguments.put(name, text, line)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise arguments.error(line, f"{name} is no YAML: {' '.join(str(error).split())}") from None
