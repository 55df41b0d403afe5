"""What a trainer rank publishes weights with, by channel. Part of the composition root: beside `program.py`, the only
place that names the concrete classes. Imports them where they are made: a rank that writes folders sends nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ...actors.weights.channel_ends import ChannelEnds, EndMakers
from ...core.config import RunConfig
from ...core.messages import WeightChannel
from ...core.process import boot_id
from ...core.protocols import WeightSender, WeightWriter
from ...core.weight_channel import SHARED_CHANNELS
from .memory_parts import takes_turns
from .weight_channels import is_beside_an_engine

MIB = 1 << 20


def channel_ends(config: RunConfig, run_dir: Path, rank: int, *, local_rank: int) -> ChannelEnds:
    """Of one rank; each end is made when it is first used."""
    from ...actors.weights.channels.disk import clear_folders

    makers = EndMakers(
        writer=lambda channel: weight_writer(config, run_dir, channel),
        sender=lambda channel: weight_sender(config, rank, channel, local_rank=local_rank),
        clear=lambda: clear_folders(weight_folder(run_dir)),
    )
    return ChannelEnds(f"trainer/{rank}", makers, writes=rank == 0)


def weight_folder(run_dir: Path) -> Path:
    """Where versions of the channel disk lie."""
    return run_dir / "weights"


def weight_writer(config: RunConfig, run_dir: Path, channel: WeightChannel) -> WeightWriter:
    """Where engines read versions from."""
    from ...actors.weights.channels.reader import ReadChannel, make_writer

    return make_writer(cast(ReadChannel, channel), weight_folder(run_dir), Path(config.model.path))


def weight_sender(config: RunConfig, rank: int, channel: WeightChannel, *, local_rank: int) -> WeightSender:
    """What sends versions from this rank's device."""
    from ...actors.weights.channels.fp8 import Fp8Rule
    from ...actors.weights.channels.sender import DeviceWeightSender, SentChannel

    rule = Fp8Rule.of_folder(Path(config.weights.served_folder or config.model.path))
    return DeviceWeightSender(
        f"trainer/{rank}",
        channel=cast(SentChannel, channel),
        bucket_bytes=config.weights.bucket_mb * MIB,
        host=boot_id(),
        quantise=None if rule is None else rule.apply,
        keeps_buffers=not takes_turns(config),
        is_needed=channel not in SHARED_CHANNELS or is_beside_an_engine(config, local_rank),
    )
