"""What a handler inherits from its caller: the time left, who waits for it, the trace it belongs to.

Travels in a context variable, so nested calls inherit it without being told. Tasks that outlive the handler
(`ctx.spawn`) start with an empty scope: a background loop has no deadline.
"""

from __future__ import annotations

import contextvars

import msgspec

from .ids import PeerKey


class CallScope(msgspec.Struct, frozen=True, gc=False):
    """The call being handled in this task, if any."""

    deadline_at: float | None = None
    """Seconds on the node's monotonic clock; None: no limit."""
    chain: tuple[str, ...] = ()
    """Actors ("name@epoch") that are held up, handling a call serially, until this one returns; oldest first."""
    trace: bytes = b""
    """24 bytes (W3C trace id, span id) or nothing."""
    caller: PeerKey | None = None
    """Incarnation that made the call, as its connection proved it."""


NO_SCOPE = CallScope()

_scope: contextvars.ContextVar[CallScope] = contextvars.ContextVar("myxa_call_scope", default=NO_SCOPE)


def current_caller() -> PeerKey | None:
    """Incarnation that made the call being handled, as its connection proved it; None outside of a handler."""
    return _scope.get().caller


current_scope = _scope.get
"""The call being handled in this task, or `NO_SCOPE`."""

enter_scope = _scope.set
"""Make a scope the current one; give the token to `leave_scope`."""


def leave_scope(token: contextvars.Token[CallScope]) -> None:
    _scope.reset(token)


def fresh_context(scope: CallScope = NO_SCOPE) -> contextvars.Context:
    """A copy of the current context with `scope` in place of the current one."""
    context = contextvars.copy_context()
    context.run(_scope.set, scope)
    return context


def remaining_s(deadline_s: float | None, now: float) -> float | None:
    """Seconds for a nested call: its own deadline, cut to what the call being handled has left; None: no limit."""
    inherited = _scope.get().deadline_at
    if inherited is None:
        return deadline_s
    left = inherited - now
    return left if deadline_s is None else min(left, deadline_s)
