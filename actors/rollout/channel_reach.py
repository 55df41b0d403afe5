"""Whether new weights can reach this actor's engine by another channel than the run began with.

Knows hosts and the run directory. What follows from the run's own shape (kinds, devices) is judged before anybody is
asked: this is for what only this place can tell. Must not know readers, routes or the trainer.
"""

from __future__ import annotations

from pathlib import Path

from ...core.host import boot_id
from ...core.messages import WeightChannel
from ..contracts.roles import RolloutContract

OF_EVERY_RUN = "ledger.sqlite"
"""Written where the buffer is: seen elsewhere only through a file system that both share."""


class ReachedByChannels(RolloutContract):
    """The handler. Set `_run_dir` in `__init__`; empty: it is not known, and folders are not looked for."""

    _run_dir: str

    async def judge_channel(self, channel: WeightChannel, host: str) -> str:
        if host == boot_id():
            return ""
        if channel in ("shm", "cuda_ipc"):
            return "is on another host than trainer/0, whose memory it cannot read"
        if channel == "disk" and self._run_dir and not (Path(self._run_dir) / OF_EVERY_RUN).exists():
            return f"is on another host than trainer/0, and {self._run_dir} is not on a file system that both share"
        return ""
