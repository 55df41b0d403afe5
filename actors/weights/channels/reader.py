"""The host channels, shared memory and folders: the writer by its channel, the reader by what a manifest names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from ....core.errors import EngineError
from ....core.messages import WeightManifest
from ....core.process import boot_id
from ....core.protocols import NamedArray, WeightWriter
from .disk import DiskWeightReader, DiskWeightWriter, clear_folders
from .shm import ShmWeightReader, ShmWeightWriter

ReadChannel = Literal["shm", "disk"]


class ChannelReader:
    """Reads whatever channel a manifest names. Fulfils `core.protocols.WeightReader`."""

    def __init__(self) -> None:
        self._disk = DiskWeightReader()
        self._shm = ShmWeightReader()

    def open(self, manifest: WeightManifest) -> AbstractContextManager[Mapping[str, NamedArray]]:
        """See the protocol. Shared memory of another host is refused by name instead of failing as a missing file."""
        if manifest.channel == "disk":
            return self._disk.open(manifest)
        if manifest.host != boot_id():
            raise EngineError(
                f"weight version {manifest.version} lies in the shared memory of another host ({manifest.host})",
                remedy="let trainer and rollout share their nodes, or name different nodes so that folders are used",
            )
        return self._shm.open(manifest)

    def close(self) -> None:
        self._shm.close()


def make_writer(channel: ReadChannel, folder: Path, model_folder: Path) -> WeightWriter:
    """The trainer's end. `folder` holds the versions of the disk channel; `model_folder` gives config and tokenizer."""
    if channel == "disk":
        return DiskWeightWriter(folder, model_folder, boot_id())
    clear_folders(folder)  # the run wrote folders before it was resumed
    return ShmWeightWriter(boot_id())
