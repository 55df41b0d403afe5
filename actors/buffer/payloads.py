"""Groups as the ledger holds them, back as records; and the short account of each that the trainer's leader plans by.

Knows ledger and payload format. Must not know admission or who asks.
"""

from __future__ import annotations

import msgspec

from ...core.errors import LedgerError
from ...core.messages import GroupMeta
from ...core.samples import NO_VERSION, Group, Sample
from ..ledger.ledger import Ledger
from ..ledger.payload import decode_group, decode_partial, encode
from ..ledger.states import Row, State
from .checks import wrong_in_partial
from .settings import LiveSettings, Terms


class Payloads:
    """What groups hold. Raises LedgerError naming a group whose payload is damaged or not there."""

    def __init__(self, ledger: Ledger, settings: LiveSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._metas: dict[int, GroupMeta] = {}
        self._terms: dict[int, Terms] = {}
        self.newest: Group | None = None
        """The group that was kept last, as it is kept: some of its members may be masked."""

    def partial(self, group_id: int) -> tuple[Sample, ...]:
        """Unfinished samples; empty if there are none."""
        data = self._ledger.payload(group_id)
        return () if data is None else decode_partial(group_id, data)

    def save_partial(self, row: Row, partial: tuple[Sample, ...]) -> bool:
        """Keep unfinished samples of a group that is under way; False if something is wrong with them."""
        if not partial or wrong_in_partial(partial, row.group_id, row.num_samples) is not None:
            return False
        self._ledger.save_partial(row.group_id, encode(partial))
        return True

    def group(self, group_id: int) -> Group:
        """A whole group."""
        row = self._ledger.find(group_id)
        if row is None:
            raise LedgerError(f"group {group_id} was never drawn")
        if row.state not in (State.READY, State.CLAIMED, State.TRAINED):
            raise LedgerError(f"group {group_id} is {row.state}: it has no payload to fetch")
        group = decode_group(group_id, self._ledger.payload(group_id) or b"")
        return group if row.terms else _at(group, self.terms_of(row).sampling.temperature)

    def meta_of(self, row: Row) -> GroupMeta:
        """The account of a group that is whole."""
        meta = self._metas.get(row.group_id)
        return meta or self.keep_meta(self.group(row.group_id), row.version)

    def keep_meta(self, group: Group, version: int) -> GroupMeta:
        """A group that has just arrived; `version`: of its oldest token."""
        meta = self._metas[group.group_id] = _meta(group, version)
        self.newest = group
        return meta

    def forget(self, group_id: int) -> None:
        """Nobody plans with it any more."""
        self._metas.pop(group_id, None)

    def forget_all(self) -> None:
        """The rows were changed under our feet."""
        self._metas.clear()

    # ---- terms

    def number_terms(self, terms: Terms) -> int:
        """Under which number the ledger keeps these terms."""
        number = self._ledger.number_terms(msgspec.json.encode(terms).decode())
        self._terms[number] = terms
        return number

    def terms_of(self, row: Row) -> Terms:
        """The terms that a group was dispatched under first."""
        if row.terms not in self._terms:
            text = self._ledger.terms(row.terms)
            try:
                terms = msgspec.json.decode(text, type=Terms) if row.terms else self._settings.first_terms
            except msgspec.MsgspecError as error:
                raise LedgerError(f"the terms of group {row.group_id} are damaged: {error}") from error
            self._terms[row.terms] = terms
        return self._terms[row.terms]


def oldest_version(partial: tuple[Sample, ...], version: int) -> int:
    """Oldest stamp of unfinished samples, or of what starts now at `version`."""
    stamps = [stamp for stamp in (sample.oldest_version() for sample in partial) if stamp >= 0]
    return min([*stamps, version]) if version >= 0 else min(stamps, default=NO_VERSION)


def _at(group: Group, temperature: float) -> Group:
    """A group from before samples told their temperature."""
    samples = tuple(msgspec.structs.replace(sample, temperature=temperature) for sample in group.samples)
    return msgspec.structs.replace(group, samples=samples)


def _meta(group: Group, version: int) -> GroupMeta:
    return GroupMeta(
        group_id=group.group_id,
        num_tokens=tuple(sample.num_tokens for sample in group.samples),
        loss_tokens=tuple(int(sample.loss_mask.sum()) for sample in group.samples),
        rewards=tuple(float(reward) for reward in group.rewards),
        oldest_version=version,
    )
