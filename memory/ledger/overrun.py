"""Tags that grew beyond what their tenant said before: told, counted, and made room for; never taken for granted."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.device_memory import TenantReport
from .refusal import in_words
from .tenant_states import is_mapped

TOLERANCE = 0.02


def overruns(before: TenantReport, after: TenantReport) -> Iterator[str]:
    """A sentence for each mapped tag that is larger than it was by more than 2 %. What was planned before anything was
    loaded is an estimate, and no promise."""
    if before.state in ("cold", "granted") or before.reserved_bytes:
        return
    known = {tag.tag: tag.num_bytes for tag in before.tags}
    for tag in after.tags:
        old = known.get(tag.tag, 0)
        if old and is_mapped(tag) and tag.num_bytes > old * (1 + TOLERANCE):
            yield f"{tag.tag} grew from {in_words(old)} to {in_words(tag.num_bytes)}"
