"""What a trainer rank publishes weights with, by channel. Part of the composition root: beside `program.py`, the only
place that names the concrete classes. Imports them where they are made: a rank that writes folders sends nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ...actors.trainer.channel_ends import ChannelEnds, EndMakers
from ...core.config import RunConfig
from ...core.host import boot_id
from ...core.messages import WeightChannel
from ...core.protocols import WeightSender, WeightWriter
from .memory_parts import takes_turns

MIB = 1 << 20


def channel_ends(config: RunConfig, run_dir: Path, rank: int) -> ChannelEnds:
    """Of one rank; each end is made when it is first used."""
    makers = EndMakers(
        writer=lambda channel: weight_writer(config, run_dir, channel),
        sender=lambda channel: weight_sender(config, rank, channel),
    )
    return ChannelEnds(f"trainer/{rank}", makers, writes=rank == 0)


def weight_writer(config: RunConfig, run_dir: Path, channel: WeightChannel) -> WeightWriter:
    """Where engines read versions from."""
    from ...actors.weights.channel import ReadChannel, make_writer

    return make_writer(cast(ReadChannel, channel), run_dir / "weights", Path(config.model.path))


def weight_sender(config: RunConfig, rank: int, channel: WeightChannel) -> WeightSender:
    """What sends versions from this rank's device."""
    from ...actors.weights.fp8 import Fp8Rule
    from ...actors.weights.sender import DeviceWeightSender, SentChannel

    rule = Fp8Rule.of_folder(Path(config.weights.served_folder or config.model.path))
    return DeviceWeightSender(
        f"trainer/{rank}",
        channel=cast(SentChannel, channel),
        bucket_bytes=config.weights.bucket_mb * MIB,
        host=boot_id(),
        quantise=None if rule is None else rule.apply,
        keeps_buffers=not takes_turns(config),
    )
