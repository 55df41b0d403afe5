"""One manifest out of what several sending ranks publish of one version: parts of the model (pipeline stages), or over
a shared channel the whole model each. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...core.messages import WeightManifest
from ...core.weight_channel import SHARED_CHANNELS


def join_parts(parts: Mapping[str, WeightManifest | None]) -> WeightManifest | None:
    """Parts by rank, in order of ranks; None if no rank published. Locations and digests are joined by commas."""
    published = [part for part in parts.values() if part is not None]
    if len(published) < 2:
        return published[0] if published else None
    is_whole = published[0].channel in SHARED_CHANNELS
    return msgspec.structs.replace(
        published[0],
        location=",".join(part.location for part in published),
        digest=",".join(part.digest for part in published),
        num_bytes=published[0].num_bytes if is_whole else sum(part.num_bytes for part in published),
    )
