"""Weight manifests that describe no bytes, for tests in which only the version and the place matter."""

from __future__ import annotations

from typing import Any

from myxa.core.messages import WeightManifest


def manifest_of(version: int, location: object = "", channel: Any = "disk", **more: Any) -> WeightManifest:
    facts: dict[str, Any] = {"num_bytes": 0, "tensors": (), "digest": "", "host": ""}
    return WeightManifest(version=version, channel=channel, location=str(location), **(facts | more))
