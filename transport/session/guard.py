"""Who may speak over tcp, and as whom: public key -> incarnation and role. Sans-IO.

A key belongs to the incarnation that registered it and is void with it. The registry's own process also admits the
job's key and keys that launchers announced, which may only ask to join. Without a proof, a connection came over ipc.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...core.ids import PeerKey

Role = Literal["keeper", "node"]
"""keeper: joined with the job's key, or is on the registry's host: may admit others and report their ends.
node: joined with an announced key: may do everything in its own name."""

PROVISIONAL = 1 << 31
"""Set in the number of a process that has not joined yet; its epoch is 0."""
MAX_CANDIDATES = 4096
MAX_STRANGERS = 1024


@dataclass(frozen=True, slots=True)
class KeyRights:
    """The rights of a key that was announced in advance."""

    name: str
    """The only name under which it may join; "": any."""
    role: Role
    key: str = ""
    """It must join with this public key; "": any."""


ANYBODY = KeyRights("", "keeper")
"""Of the job's key, and of peers whom the operating system vouches for."""


class PeerGuard:
    """Admits keys. One per process that listens on tcp."""

    def __init__(self, root: str, *, registry_node: int, is_registry: bool) -> None:
        self._root = root
        self._registry_node = registry_node
        self._is_registry = is_registry
        self._members: Mapping[str, tuple[PeerKey, str]] = {}
        self._candidates: OrderedDict[str, KeyRights] = OrderedDict()
        self._strangers: OrderedDict[PeerKey, KeyRights] = OrderedDict()

    def follow(self, members: Mapping[str, tuple[PeerKey, str]]) -> None:
        """The directory changed; at once this is the list."""
        self._members = members

    def expect(self, badge: KeyRights) -> None:
        """The registry's process: a process with that key will ask to join. A later key of that name replaces it."""
        for key in [key for key, rights in self._candidates.items() if rights.name == badge.name]:
            del self._candidates[key]
        _remember(self._candidates, badge.key, badge, MAX_CANDIDATES)

    def joined(self, key: str) -> None:
        """That key has been used to join; it does so once."""
        self._candidates.pop(key, None)

    def admits(self, key: str) -> bool:
        """ZeroMQ asks whether that key may connect. The directory may be behind: it may be admitted in a moment."""
        return key == self._root or key in self._members or key in self._candidates

    def objection(self, proof: str, peer: PeerKey, name: str) -> str:
        """Why a connection that was admitted with that key may not speak as `peer`; "" if it may."""
        if not proof:
            if is_provisional(peer):
                _remember(self._strangers, peer, ANYBODY, MAX_STRANGERS)
            return ""
        if proof == self._root and not self._is_registry:
            return "" if peer.node_id == self._registry_node else f"the job's key is not the key of {name}"
        if is_provisional(peer):
            return self._welcome(proof, peer)
        member = self._members.get(proof)
        if member is None:
            return f"its key is not registered now, but it says it is {name}"
        if member != (peer, name):
            return f"its key is that of {member[1]} ({member[0]}), but it says it is {name} ({peer})"
        return ""

    def _welcome(self, proof: str, peer: PeerKey) -> str:
        badge = ANYBODY if proof == self._root else self._candidates.get(proof)
        if badge is None:
            return "only the job's key, or one that a launcher announced, may ask to join"
        _remember(self._strangers, peer, badge, MAX_STRANGERS)
        return ""

    def stranger(self, peer: PeerKey) -> KeyRights | None:
        """What a process that asks to join has shown; None: it is not remembered (any more)."""
        return self._strangers.get(peer)

    def expected(self, key: str) -> KeyRights | None:
        return self._candidates.get(key)


def is_provisional(peer: PeerKey) -> bool:
    return peer.epoch == 0 and bool(peer.node_id & PROVISIONAL)


K = TypeVar("K")
V = TypeVar("V")


def _remember(entries: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """The oldest goes for the newest."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > limit:
        entries.popitem(last=False)
