"""What goes over the control socket: requests, answers and errors as JSON, with their limits. Sans-IO.

Nothing here is executed: a request names a verb of a closed table, and its arguments are decoded into the types which
that verb declares.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...core.errors import ConfigError, MyxaError
from ...core.suggestion import suggest
from .verb import Arguments

MAX_REQUEST_BYTES = 1 << 20
"""Of one line, or one HTTP body."""
MAX_DEPTH = 32
"""Of nested arrays and objects in a request."""
MAX_QUOTED_CHARS = 200
"""Of what a caller sent, in an answer to it."""
NO_ARGUMENTS = msgspec.Raw(b"{}")

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the newline protocol."""

    verb: str
    id: int | str | None = None
    """Comes back with the answer."""
    args: msgspec.Raw = NO_ARGUMENTS


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the caller gets it."""

    type: str
    message: str
    remedy: str
    exit_code: int


def decode_request(line: bytes | bytearray) -> Request:
    """Raises ConfigError saying what is wrong with the line."""
    check_depth(line)
    try:
        return _REQUESTS.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"that is no request: {error}", remedy='write one line: {"id": 1, "verb": "ps", "args": {}}'
        ) from None


_BEYOND = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+) - at `\$\.(\w+)`")
_RELATIONS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def check_depth(text: bytes | bytearray) -> None:
    """Raises ConfigError if the JSON nests too deeply; before it is decoded, in time linear in its length."""
    depth = 0
    for byte in _STRINGS.sub(b"", bytes(text)).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ConfigError(f"the request nests more than {MAX_DEPTH} levels", remedy="no verb needs that")


def decode_arguments(verb: str, kind: type[Arguments], raw: msgspec.Raw | bytes) -> Arguments:
    """The verb's arguments, types checked. Raises ConfigError with a hint."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _wrong_arguments(verb, kind, error) from None


def arguments_from_text(verb: str, kind: type[Arguments], pairs: list[tuple[str, str]]) -> Arguments:
    """The same from the text of a URL's query: a key that is given again makes a list longer."""
    lists = {field.encode_name for field in msgspec.structs.fields(kind) if _is_list(field.type)}
    table: dict[str, Any] = {}
    for name, text in pairs:
        if name in lists:
            table.setdefault(name, []).append(text)
        else:
            table[name] = text
    try:
        return msgspec.convert(table, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_arguments(verb, kind, error) from None


def _is_list(annotation: Any) -> bool:
    while hasattr(annotation, "__metadata__"):  # Annotated
        annotation = annotation.__origin__
    return getattr(annotation, "__origin__", annotation) in (tuple, list)


def _wrong_arguments(verb: str, kind: type[Arguments], error: Exception) -> ConfigError:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = _UNKNOWN_FIELD.search(str(error))
    if unknown and known:
        hint = suggest(unknown[1][:MAX_QUOTED_CHARS], known)
    else:
        hint = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return ConfigError(f"{verb}: {_in_words(str(error))[:MAX_QUOTED_CHARS]}", remedy=hint)


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


def encode(answer: dict[str, Any]) -> bytes:
    """One line."""
    return _ENCODER.encode(answer) + b"\n"


_REQUESTS = msgspec.json.Decoder(Request)
_ENCODER = msgspec.json.Encoder(enc_hook=str)
