"""Weights through model folders: for engines on other hosts, and for servers that load from disk.

Each version is a complete HuggingFace folder, so any server that takes a model path can load it; `models/hf_folder.py`
writes and reads it. The digest is BLAKE2b over the tensors' bytes in the order of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....core.errors import EngineError, MyxaError, TrainError
from ....core.messages import WeightManifest
from ....core.protocols import NamedArray
from ...models.hf_folder import open_weights, read_config, write_folder


@dataclass(slots=True)
class DiskWeightWriter:
    """Publishes versions as folders `<root>/version_<v>`; `release` deletes them."""

    root: Path
    model_folder: Path
    host: str
    _folders: dict[int, Path] = field(default_factory=dict[int, Path])
    _is_clear: bool = False

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Write the folder; the first one takes the place of all that a killed trainer left. Raises TrainError naming
        the path when the disk refuses."""
        if not self._is_clear:
            clear_folders(self.root)
            self._is_clear = True
        folder = self.root / f"version_{version:08d}"
        try:
            config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
            write_folder(folder, config, tensors, tokenizer_from=self.model_folder)
        except (OSError, MyxaError) as err:
            raise TrainError(
                f"cannot write weight version {version} to {folder}: {err}",
                remedy="free disk space, or put run.dir on another disk",
            ) from err
        self._folders[version] = folder
        return WeightManifest(
            version=version,
            channel="disk",
            location=str(folder),
            generation=0,
            num_bytes=sum(t.spec.num_bytes for t in tensors),
            tensors=tuple(t.spec for t in tensors),
            digest=_digest(tensors),
            host=self.host,
        )

    def release(self, version: int) -> None:
        folder = self._folders.pop(version, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete every folder that was not released, and the one around them."""
        for version in list(self._folders):
            self.release(version)
        _remove_empty(self.root)


def clear_folders(root: Path) -> None:
    """Delete what a trainer that was killed has left below `root`, where one at a time writes. Never raises: a version
    of the same number is written over what stayed."""
    for folder in root.glob("version_*"):
        shutil.rmtree(folder, ignore_errors=True)
    _remove_empty(root)


def _remove_empty(root: Path) -> None:
    with suppress(OSError):  # there is none, or it holds other files
        root.rmdir()


class DiskWeightReader:
    """Reads a published folder; the digest is checked before anything is handed out."""

    @contextmanager
    def open(self, manifest: WeightManifest, *, reads_all: bool = True) -> Generator[Mapping[str, NamedArray]]:
        """Named tensors of the version. Raises EngineError for a missing, torn or altered folder; `reads_all` False: as
        far as its headers show, at the same cost for any model."""
        folder = Path(manifest.location)
        try:
            with open_weights(folder, read_config(folder)) as tensors:
                _check(manifest, tensors, reads_all=reads_all)
                yield tensors
        except EngineError:
            raise
        except MyxaError as err:
            raise EngineError(
                f"cannot read weight version {manifest.version} from {folder}: {err.message}",
                remedy="the folder must be reachable from this host (a shared file system) and left as it was written",
            ) from err


def _check(manifest: WeightManifest, tensors: Mapping[str, NamedArray], *, reads_all: bool) -> None:
    for spec in manifest.tensors:
        found = tensors.get(spec.name)
        if found is None or (found.spec.dtype, found.spec.shape) != (spec.dtype, spec.shape):
            raise EngineError(
                f"weight version {manifest.version}: {spec.name} in {manifest.location} is not what was published",
                remedy="do not write into the run's weight folders",
            )
    if reads_all and _digest([tensors[spec.name] for spec in manifest.tensors]) != manifest.digest:
        raise EngineError(
            f"weight version {manifest.version} in {manifest.location} does not match its digest",
            remedy="the files were altered or are torn; the next version will be read afresh",
        )


def _digest(tensors: Sequence[NamedArray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.data)
    return f"blake2b:{digest.hexdigest()}"
