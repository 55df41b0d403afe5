"""How large arrays travel between processes of one host; may be changed while everything runs."""

from __future__ import annotations

import msgspec


class TensorPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one process; sizes in bytes."""

    threshold_bytes: int = 256 << 10
    """Arrays from this size on travel as a handle; 0: none does."""
    pool_bytes: int = 512 << 20
    """Shared memory for blocks, at most."""
    spare_bytes: int = 1 << 30
    """Memory of received arrays that is kept warm for the next ones for a few seconds, at most."""
    wait_s: float = 0.2
    """How long a message waits for room in the pool before its array goes over the wire."""
    may_pull: bool = True
    """Let others read arrays of ours that are lent, where the kernel permits it."""
    may_map: bool = True
    """Let others read our slabs."""
