"""Requests and answers of the control sockets as JSON. Sans-IO.

Nothing here is executed: a request names a verb of a closed table, and its arguments are decoded into the types which
that verb declares.
"""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

from ...core.errors import ConfigError, MyxaError
from ...core.knobs import Operator
from ...core.record import Record
from ...core.suggestion import suggest
from .verbs import WHO, Verb, argument_names

MAX_DEPTH = 32
"""Of nested arrays and objects in a request."""
MAX_QUOTED_CHARS = 200
"""Of what a caller sent, in an answer to it."""

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BEYOND = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+) - at `\$\.(\w+)`")
_RELATIONS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the caller gets it."""

    type: str
    message: str
    remedy: str
    exit_code: int


def check_depth(text: bytes) -> None:
    """Raises ConfigError if the JSON nests too deeply; before it is decoded, in time linear in its length."""
    depth = 0
    for byte in _STRINGS.sub(b"", text).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ConfigError(f"the request nests more than {MAX_DEPTH} levels", remedy="no verb needs that")


def arguments_from_body(verb: Verb[Any], body: bytes, who: Operator) -> Record:
    """The verb's arguments from JSON, types checked. Raises ConfigError with a hint."""
    check_depth(body)
    try:
        table: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{verb.name}: that is no JSON: {error}", remedy=_taken(verb)) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{verb.name}: the body must be an object of arguments", remedy=_taken(verb))
    return _arguments(verb, cast("dict[str, Any]", table), who, strict=True)


def arguments_from_query(verb: Verb[Any], pairs: list[tuple[str, str]], who: Operator) -> Record:
    """The same from the text of a URL's query: a key that is given again makes a list longer."""
    lists = {field.name for field in msgspec.structs.fields(verb.arguments) if isinstance(field.default, tuple)}
    table: dict[str, Any] = {}
    for name, text in pairs:
        if name in lists:
            table.setdefault(name, []).append(text)
        else:
            table[name] = text
    return _arguments(verb, table, who, strict=False)


def _arguments(verb: Verb[Any], table: dict[str, Any], who: Operator, *, strict: bool) -> Record:
    known = argument_names(verb)
    for name in (name for name in table if name not in known):
        hint = suggest(name[:MAX_QUOTED_CHARS], known) if known else _taken(verb)
        raise ConfigError(f"{verb.name}: it takes no {name[:MAX_QUOTED_CHARS]!r}", remedy=hint)
    if WHO in verb.arguments.__struct_fields__:
        table = {**table, WHO: who}
    try:
        return msgspec.convert(table, verb.arguments, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{verb.name}: {_in_words(str(error))[:MAX_QUOTED_CHARS]}", remedy=_taken(verb)) from None


def _taken(verb: Verb[Any]) -> str:
    names = argument_names(verb)
    return f"it takes {', '.join(names)}" if names else "it takes no arguments"


def _in_words(text: str) -> str:
    """The message about a number beyond its range, without the path into a JSON that the caller may not see."""
    found = _BEYOND.fullmatch(text)
    return text if found is None else f"{found[3]} must be {_RELATIONS[found[1]]} {found[2]}"


def error_answer(error: BaseException) -> ErrorAnswer:
    """The error as the caller gets it. Of an unexpected one the caller gets the name without the details."""
    if isinstance(error, MyxaError):
        kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == MyxaError.__module__)
        return ErrorAnswer(type=kind, message=error.message, remedy=error.remedy, exit_code=error.exit_code)
    return ErrorAnswer(
        type="MyxaError",
        message=f"the launcher failed at this: {type(error).__name__}",
        remedy="this is a bug; the launcher's log has the rest",
        exit_code=1,
    )


def encode(answer: Any) -> bytes:
    return _ENCODER.encode(answer) + b"\n"


_ENCODER = msgspec.json.Encoder(enc_hook=str)
