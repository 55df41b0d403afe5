"""Weight manifests that describe no bytes, for tests in which only the version and the place matter; engines that join."""

from __future__ import annotations

from typing import Any

from myxa.actors.weights.rollout_update import Adoption
from myxa.core.messages import WeightManifest


def manifest_of(version: int, location: object = "", channel: Any = "disk", **more: Any) -> WeightManifest:
    facts: dict[str, Any] = {"num_bytes": 0, "tensors": (), "digest": "", "host": ""}
    return WeightManifest(version=version, channel=channel, location=str(location), **(facts | more))


def join(adoption: Adoption, engine: str, epoch: int, version: int = -1) -> None:
    """It reports in, and has the knobs at once."""
    adoption.arrived(engine, epoch, version)
    adoption.joined(engine, epoch)
