"""Errors as data: what a caller learns of an error on the other side.

The wire carries a class name from the closed tree in `core/errors.py`, text, and a traceback as text; never an object.
Outcome classes keep their meaning: an error that a handler got from a call of *its own* says nothing about the call
being handled and therefore arrives as `RemoteError`.
"""

from __future__ import annotations

import traceback
from typing import TypeVar

import msgspec
import orjson

from ...core import errors
from ...core.errors import (
    CallError,
    DeadlineExceeded,
    FailureKind,
    MemberFailed,
    MyxaError,
    NotExecuted,
    OutcomeUnknown,
    RemoteError,
)
from ..codec import Buffer

E = TypeVar("E", bound=MyxaError)
TRACEBACK_CHARS = 20_000


def _tree(root: type[MyxaError]) -> dict[str, type[MyxaError]]:
    classes = {root.__name__: root}
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            classes.update(_tree(child))
    return classes


_KNOWN = _tree(MyxaError)


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire."""

    kind: str
    """Class in the error tree, or "RemoteError"."""
    message: str
    remedy: str = ""
    remote_type: str = ""
    traceback: str = ""
    blame: FailureKind = "environment"


def fault_of(error: BaseException) -> Fault:
    """What the caller gets for `error`, which a handler raised or the runtime refused with."""
    remote_type = type(error).__qualname__
    kind = next((c for c in type(error).__mro__ if _KNOWN.get(c.__name__) is c), None)
    is_of_another_call = isinstance(error, CallError) and error.callee != ""
    if kind is None or not isinstance(error, MyxaError) or is_of_another_call or isinstance(error, RemoteError):
        return Fault(kind="RemoteError", message=str(error), remote_type=remote_type, traceback=_traceback(error))
    return Fault(
        kind=kind.__name__,
        message=error.message,
        remedy=error.remedy,
        remote_type=remote_type,
        traceback="" if isinstance(error, NotExecuted) else _traceback(error),
        blame=error.kind if isinstance(error, MemberFailed) else "environment",
    )


def _traceback(error: BaseException) -> str:
    """As text. Not for refusals: each nonsense message would have source files read and parsed."""
    return "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]


def encode_fault(error: BaseException) -> bytes:
    return orjson.dumps(msgspec.to_builtins(fault_of(error)), option=orjson.OPT_PASSTHROUGH_SUBCLASS)


def decode_fault(body: Buffer, callee: str, method: str, *, is_refusal: bool) -> MyxaError:
    """The exception for the caller. Unreadable or impossible bodies become OutcomeUnknown (refusals: NotExecuted)."""
    try:
        fault = msgspec.convert(orjson.loads(body), Fault)
    except (msgspec.ValidationError, ValueError) as error:
        kind = NotExecuted if is_refusal else OutcomeUnknown
        return with_callee(kind(f"{callee}.{method}: an error came that cannot be read: {error}"), callee)
    error = _error_of(fault, callee, method)
    if is_refusal and not isinstance(error, NotExecuted | DeadlineExceeded):
        error = NotExecuted(f"{callee}.{method} was refused: {fault.message}")
    return with_callee(error, callee)


def _error_of(fault: Fault, callee: str, method: str) -> MyxaError:
    kind = _KNOWN.get(fault.kind, RemoteError)
    if issubclass(kind, RemoteError):
        message = f"{callee}.{method} raised {fault.remote_type or 'an error'}: {fault.message}"
        return RemoteError(message, remote_type=fault.remote_type, remote_traceback=fault.traceback)
    if issubclass(kind, MemberFailed):
        return kind(fault.message, kind=fault.blame, remedy=fault.remedy)
    error = kind(fault.message, remedy=fault.remedy)
    if fault.traceback:
        error.add_note(f"on {callee}:\n{fault.traceback}")
    return error


def with_callee(error: E, callee: str) -> E:
    """The same error, which says whom the call was for."""
    if isinstance(error, CallError):
        error.callee = callee
    return error
