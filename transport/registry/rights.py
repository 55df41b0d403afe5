"""Who may tell the registry what: nobody speaks in another's name. Sans-IO.

The caller is known by its connection. Whoever came over ipc or in the process is trusted as far as the operating system
trusts him: to the processes of one user on one host everything is allowed, as to launchers.
"""

from __future__ import annotations

from ...core.errors import NotPermitted, StaleEpoch
from ...core.ids import PeerKey
from ..session.guard import ANYBODY, ROLES, Badge, Guard, is_provisional
from ..session.hello import is_public_key
from ..wire import Endpoints
from .directory import NodeRecord
from .state import REGISTRY_NODE_ID, RegistryState


class RegistryRights:
    """Each method raises NotPermitted; StaleEpoch for a caller that is over."""

    def __init__(self, state: RegistryState, guard: Guard | None) -> None:
        self._state = state
        self._guard = guard
        self.num_refused = 0

    def to_register(self, name: str, endpoints: Endpoints, caller: PeerKey | None) -> str:
        """May that caller join as `name`, listening there? Returns the role that it has then."""
        if self._guard is None:
            return ANYBODY.role
        badge = self._guard.stranger(caller) if caller is not None and is_provisional(caller) else None
        if badge is None:
            raise self._refusal("only a process that has not joined yet may register")
        expected = self._guard.expected(endpoints.curve)
        badge = expected if expected is not None and badge == ANYBODY else badge
        if badge.name not in ("", name) or badge.key not in ("", endpoints.curve):
            raise self._refusal(f"the key that was announced for {badge.name} was used to join as {name}")
        living = self._state.node(name)
        if living is not None and living.node_id == REGISTRY_NODE_ID:
            raise self._refusal(f"{name} is the process of the registry itself")
        self._check_key(name, endpoints)
        self._guard.joined(endpoints.curve)
        return badge.role

    def _check_key(self, name: str, endpoints: Endpoints) -> None:
        key = endpoints.curve
        if not key:
            if any(endpoints.tcp):
                raise self._refusal(f"{name} listens on tcp and has no key")
            return
        owner = next((n.name for n in self._state.nodes("") if n.endpoints.curve == key), name)
        if not is_public_key(key) or owner != name:
            raise self._refusal(f"{name} gives a key that is {'no key' if owner == name else f'that of {owner}'}")

    def to_speak_for(self, name: str, caller: PeerKey | None) -> None:
        """About `name` itself."""
        record = self._record(caller)
        if record is not None and record.role != "keeper" and record.name != name:
            raise self._refusal(f"{record.name} spoke for {name}")

    def to_rejoin(self, record: NodeRecord, caller: PeerKey | None) -> None:
        """Say again what the registry knew of it; nobody gets another key or role that way."""
        self.to_speak_for(record.name, caller)
        known = self._record(caller)
        if known is not None and (known.key, known.role, known.endpoints.curve) != (
            record.key, record.role, record.endpoints.curve,
        ):  # fmt: skip
            raise self._refusal(f"{known.name} came back with another number, key or role")

    def to_keep(self, what: str, caller: PeerKey | None) -> None:
        """What only launchers may do."""
        record = self._record(caller)
        if record is not None and record.role != "keeper":
            raise self._refusal(f"{record.name} may not {what}")

    def to_expect(self, name: str, public_key: str, role: str, caller: PeerKey | None) -> None:
        """Announce a key; notes it."""
        self.to_keep("announce keys", caller)
        found = ROLES.get(role)
        if found is None or not is_public_key(public_key):
            raise self._refusal(f"there is no role {role!r}" if found is None else "that is no public key")
        if self._guard is not None:
            self._guard.expect(Badge(name, found, public_key))

    def _record(self, caller: PeerKey | None) -> NodeRecord | None:
        """Of a member; None: within the process. Somebody who has not joined may say nothing but `register`."""
        if self._guard is None or caller is None:
            return None
        for record in self._state.nodes(""):
            if record.key == caller:
                return record
        self.num_refused += 1
        raise StaleEpoch(f"{caller} is not registered (any more)")

    def _refusal(self, why: str) -> NotPermitted:
        self.num_refused += 1
        return NotPermitted(why, remedy="a process speaks under its own name and key; launchers hold the job's key")
