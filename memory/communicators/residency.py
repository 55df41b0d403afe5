"""How the communicators of a process leave its devices and come back: one interface, a ladder of ways.

    keep      they stay; told with their bytes
    suspend   the library releases their memory in place (NCCL >= 2.29.7 by torch >= 2.12, or through its own C calls)
    reload    a proxy backend drops what is inside a process group and builds it again, lazily; the group stays itself
    rebuild   the owner destroys its groups and makes them again; the last resort, identities change

All of them are collective in effect: every member of every group does the same under the same epoch, in one order.
The control group (gloo) of a gang is never among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

ResidencyKind = Literal["keep", "suspend", "reload", "rebuild"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommStats:
    """Communicators of this process, as far as they tell."""

    kind: ResidencyKind
    epoch: int
    num_groups: int
    num_live: int
    """Of them built and not released now."""
    device_bytes: int = 0
    """0 where the library does not tell."""
    by_group: dict[str, int] = field(default_factory=dict[str, int])


class CommResidency(Protocol):
    """See the module's head. Methods block and are called in the process's backend thread, never on the event loop."""

    @property
    def kind(self) -> ResidencyKind:
        """The way taken."""
        ...

    def stats(self) -> CommStats:
        """How things stand."""
        ...

    def release(self, epoch: int, timeout_s: float) -> CommStats:
        """Give the memory back. Idempotent for an epoch; an epoch older than the newest seen is refused.
        Raises MemoryFault naming group and rank when the others did not come within `timeout_s`."""
        ...

    def restore(self, epoch: int, timeout_s: float) -> CommStats:
        """Usable again under `epoch`, which is newer than that of the release."""
        ...

    def abort(self) -> None:
        """A member died: give up whatever hangs in a collective, and the memory with it."""
        ...
