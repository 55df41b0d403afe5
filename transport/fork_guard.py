"""After a fork the child has a copy of every node, and none of them may be touched: the sockets, their threads' work
and the loop's epoll set belong to the parent (a child that unregisters a descriptor does so in the parent too).

One hook for the whole process, registered when the first node attaches, turns the child's copies into objects that
raise. It opens, closes and locks nothing. What the child inherits in descriptors is closed when it ends or executes
another program; all are marked close-on-exec.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable
from typing import Any, NoReturn

from ..core.errors import LaunchError

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_is_hooked = False
"""Forked children inherit both the hook and this."""


def guard(thing: object) -> None:
    """From now on a forked child's copy of `thing` is unusable. For plain objects (no `__slots__`)."""
    global _is_hooked
    if not _is_hooked:
        os.register_at_fork(after_in_child=_poison_all)
        _is_hooked = True
    _guarded.add(thing)


def release(thing: object) -> None:
    """It has ended; nothing of it is left to be inherited."""
    _guarded.discard(thing)


class Inherited:
    """What a node, a reference's carrier or a facade is in a forked child. Closing it is allowed and does nothing."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return _close if name == "close" else _refuse(name)


class _Nothing:
    """Result of closing: to be awaited or not."""

    def __await__(self) -> Any:
        return iter(())


def _close(*_args: object, **_kwargs: object) -> Awaitable[None]:
    return _Nothing()


def _refuse(name: str) -> NoReturn:
    raise LaunchError(
        f"{name}: this node was inherited by a fork and belongs to the parent process",
        remedy="attach a node of its own in the child, or start the child with the 'spawn' method",
    )


def _poison_all() -> None:
    """In the child, before anything else runs."""
    for thing in tuple(_guarded):
        thing.__class__ = Inherited
    _guarded.clear()
