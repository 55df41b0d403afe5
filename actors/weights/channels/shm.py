"""Weights through shared memory: for engines on the trainer's host.

The writer keeps a few slabs and writes a new version into one that has no reader any more; a version's bytes therefore
stay where they are until it is released. The reader keeps slabs open between versions, because mapping is the
expensive part, and proves what it hands out: digest before, generation before and after.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from ....core.errors import EngineError, MyxaError, TrainError
from ....core.messages import WeightManifest
from ....core.protocols import NamedArray
from ....transport.shm import SlabReader, SlabWriter, needed_bytes

MAX_OPEN = 8
"""Slabs a reader keeps open; a trainer uses as many as versions are unreleased."""


class ShmWeightWriter:
    """Trainer's end. One version per slab."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._free: list[SlabWriter] = []
        self._used: dict[int, SlabWriter] = {}

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Write into a slab without readers. Raises TrainError if there is no memory for one."""
        self.release(version)
        needed = needed_bytes([t.spec.num_bytes for t in tensors])
        try:
            slab = self._take(needed)
            # From here on it is ours: a slab in neither place would never be freed.
            self._used[version] = slab
            specs, digest, generation = slab.write(tensors)
        except MyxaError as err:
            self.release(version)
            raise TrainError(f"weight version {version} was not published: {err.message}", remedy=err.remedy) from err
        return WeightManifest(
            version=version,
            channel="shm",
            location=slab.path,
            generation=generation,
            num_bytes=sum(s.num_bytes for s in specs),
            tensors=specs,
            digest=digest,
            host=self._host,
        )

    def _take(self, needed: int) -> SlabWriter:
        for number, slab in enumerate(self._free):
            if slab.capacity_bytes >= needed:
                return self._free.pop(number)
        while self._free:  # the model changed its size: the old slabs are of no more use
            self._free.pop().close()
        return SlabWriter.create(needed)

    def release(self, version: int) -> None:
        slab = self._used.pop(version, None)
        if slab is not None:
            self._free.append(slab)

    def close(self) -> None:
        """Free all slabs; readers in the middle of one keep its memory until they are done."""
        for slab in (*self._free, *self._used.values()):
            slab.close()
        self._free.clear()
        self._used.clear()


class ShmWeightReader:
    """Engine's end."""

    def __init__(self) -> None:
        self._open: dict[str, SlabReader] = {}

    @contextmanager
    def open(self, manifest: WeightManifest) -> Generator[Mapping[str, NamedArray]]:
        """Tensors where they lie; valid inside the block. Raises EngineError on entry for a slab that is gone or does
        not match its digest, and on leaving if it was written meanwhile: what was copied must then be thrown away."""
        try:
            location = manifest.location
            slab = self._open.pop(location, None) or self._open_anew(location)
            self._open[location] = slab
            while len(self._open) > MAX_OPEN:
                self._forget(next(iter(self._open)))
            slab.verify(manifest.tensors, manifest.digest, manifest.generation)
            views = {spec.name: slab.view(spec) for spec in manifest.tensors}
        except MyxaError as err:
            self._forget(manifest.location)
            raise EngineError(f"weight version {manifest.version}: {err.message}", remedy=err.remedy) from err
        try:
            yield {spec.name: NamedArray(spec=spec, data=views[spec.name]) for spec in manifest.tensors}
            self._check_after(slab, manifest)
        finally:
            for view in views.values():
                view.release()

    def _check_after(self, slab: SlabReader, manifest: WeightManifest) -> None:
        try:
            slab.check(manifest.generation)
        except MyxaError as err:
            raise EngineError(
                f"weight version {manifest.version} was overwritten while it was read: {err.message}", remedy=err.remedy
            ) from err

    def _open_anew(self, location: str) -> SlabReader:
        """A trainer that was started again has slabs of its own; those of one that ended only hold memory."""
        slab = SlabReader.open(location)
        for other in [known for known in self._open if not os.path.lexists(known)]:
            self._forget(other)
        return slab

    def _forget(self, location: str) -> None:
        slab = self._open.pop(location, None)
        if slab is not None:
            slab.close()

    def close(self) -> None:
        for location in list(self._open):
            self._forget(location)
