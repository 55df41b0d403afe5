"""What was changed while the run goes on and must outlive the buffer's process: eta and policy, paused, stopping.

A change is kept in the ledger beside what the run file said when it was made: a restarted buffer goes on with the
change, a run file that was edited since wins over it. Knows ledger and admission only.
"""

from __future__ import annotations

import msgspec

from ..algos.staleness import Admission, Overdue
from ..core.errors import LedgerError
from .ledger import Ledger

_ADMISSION, _PAUSED, _STOPPING = "admission", "paused", "stopping"


class _Retuned(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the bound, and the settings of the run file that it changed."""

    configured_staleness: int
    configured_policy: str
    max_staleness: int
    policy: str


class LiveSettings:
    """The switches of one buffer. Applies what an earlier process of this run was told."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission
        self._configured = (admission.max_staleness, admission.policy)
        self.is_paused = bool(ledger.recall(_PAUSED))
        """No work is handed out and no batch formed."""
        self.is_stopping = bool(ledger.recall(_STOPPING))
        """No new prompts are wanted."""
        kept = ledger.recall(_ADMISSION)
        if kept:
            self._apply(kept)

    def _apply(self, kept: str) -> None:
        try:
            told = msgspec.json.decode(kept, type=_Retuned)
        except msgspec.MsgspecError as error:
            raise LedgerError(f"the ledger's admission settings are damaged: {error}") from error
        if (told.configured_staleness, told.configured_policy) == self._configured:
            self._admission.retune(max_staleness=told.max_staleness, policy=told.policy)

    def pause(self, is_paused: bool) -> None:
        """Stop or go on handing out work."""
        self._ledger.remember(_PAUSED, "yes" if is_paused else "")
        self.is_paused = is_paused

    def stop(self, is_stopping: bool = True) -> None:
        """No new prompts; False after a rewind."""
        if is_stopping != self.is_stopping:
            self._ledger.remember(_STOPPING, "yes" if is_stopping else "")
        self.is_stopping = is_stopping

    def retune(self, max_staleness: int | None, policy: str | None) -> tuple[Overdue, ...]:
        """Another bound or policy from now on; returns what is too old for it. Raises ConfigError for bad values."""
        overdue = self._admission.retune(max_staleness=max_staleness, policy=policy)
        eta, name = self._configured
        told = _Retuned(
            configured_staleness=eta,
            configured_policy=name,
            max_staleness=self._admission.max_staleness,
            policy=self._admission.policy,
        )
        self._ledger.remember(_ADMISSION, msgspec.json.encode(told).decode())
        return overdue
