"""What went wrong between a node and its peers, counted."""

from __future__ import annotations

from .opening import Opened
from .registry.registry import RegistryActor
from .session.session import Session
from .tensors.tensors import Tensors


def count_troubles(
    opened: Opened, session: Session, tensors: Tensors, registry: RegistryActor | None
) -> dict[str, int]:
    """What was dropped, refused or repeated: all zero in a healthy run."""
    return {
        **opened.counters,
        **session.counters,
        "arrays_lost": tensors.porter.num_by["lost"],
        "late_answers": session.calls.num_late,
        "casts_refused": session.calls.num_casts_refused,
        "puts_replayed": session.serving.num_replayed,
        "calls_wrong": session.serving.num_wrong,
        "rejoins_refused": registry.num_refused if registry is not None else 0,
    }
