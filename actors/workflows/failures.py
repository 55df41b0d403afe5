"""What a workflow may raise to say who is to blame, and who is blamed for any other exception.

    raise EnvironmentFailure("the game server did not answer")

| kind | raised as, or taken for it | what becomes of the member |
|---|---|---|
| environment | EnvironmentFailure; TimeoutError, a call that blocks, the end of its process | retried, then masked |
| sandbox | SandboxFailure; what docker, podman and ssh clients raise | retried, then masked |
| network | NetworkFailure; ConnectionError, ssl and name errors, what HTTP clients raise | retried, then masked |
| policy | PolicyFailure | reward 0 with `reward.on_error = "zero"`, else its group is dropped |
| user-code | everything else | its group is dropped |

Only the last two count against `reward.max_error_rate`. Pure.
"""

from __future__ import annotations

import inspect
import socket
import ssl
import subprocess
from typing import ClassVar, get_args

from ...core.errors import FailureKind

FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
RETRIED: frozenset[FailureKind] = frozenset({"environment", "sandbox", "network"})
"""Kinds without a mistake in the code: the member is tried again, and left out of its group when that does not help."""


class WorkflowFailure(Exception):
    """Base of what a workflow raises to name the kind of a failure. Not raised itself."""

    kind: ClassVar[FailureKind] = "user-code"


class EnvironmentFailure(WorkflowFailure):
    """The environment, or a tool, did not do its part."""

    kind = "environment"


class SandboxFailure(WorkflowFailure):
    """The place where the environment runs (container, virtual machine) is gone or could not be had."""

    kind = "sandbox"


class NetworkFailure(WorkflowFailure):
    """A service could not be reached."""

    kind = "network"


class PolicyFailure(WorkflowFailure):
    """The model did what it must not do: it made the environment fail."""

    kind = "policy"


_BY_TYPE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureKind], ...] = (
    ((ConnectionError, ssl.SSLError, socket.gaierror, socket.herror), "network"),
    ((TimeoutError, subprocess.TimeoutExpired), "environment"),
)
_BY_LIBRARY: dict[str, FailureKind] = {
    **dict.fromkeys(
        ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "urllib", "websockets", "grpc"),
        "network",
    ),
    **dict.fromkeys(("openai", "anthropic"), "network"),
    **dict.fromkeys(("docker", "podman", "paramiko", "asyncssh", "kubernetes", "kubernetes_asyncio"), "sandbox"),
    **dict.fromkeys(("gym", "gymnasium"), "environment"),
}
"""By the package that the exception's class, or a base of it, is defined in."""


def kind_of(error: BaseException, otherwise: FailureKind = "user-code") -> FailureKind:
    """Who is to blame for what a workflow raised; any exception may say so by its attribute `kind`."""
    if (own_kind := inspect.getattr_static(error, "kind", None)) in FAILURE_KINDS:
        return own_kind
    for types, kind in _BY_TYPE:
        if isinstance(error, types):
            return kind
    for base in type(error).__mro__:
        if (kind := _BY_LIBRARY.get(base.__module__.partition(".")[0])) is not None:
            return kind
    return otherwise
