"""What the monitor shows of the buffer: its counts as metrics. Knows the store."""

from __future__ import annotations

from ..ledger.states import State
from .store import BufferStore


def buffer_gauges(store: BufferStore) -> dict[str, float]:
    """Counts of groups now, and what became of the others so far."""
    stats = store.stats()
    values = {
        "buffer/ready": float(store.admission.num_ready),
        "buffer/under_way": float(stats.states.get(State.DISPATCHED, 0)),
        "buffer/requeued": float(stats.states.get(State.REQUEUED, 0)),
        "buffer/slots_used": float(stats.slots_used),
        "buffer/slots_total": float(stats.slots_total),
        "buffer/drawn": float(stats.drawn),
        "buffer/quarantined": float(len(store.cursor.quarantine or ())),
    }
    if store.cursor.chooses:
        values |= _of_sources(store)
    values |= store.finished.newest()
    values |= {f"buffer/masked/{reason}": float(count) for reason, count in store.ledger.tally.masked.items()}
    values |= {f"buffer/dropped/{reason}": float(count) for reason, count in stats.dropped.items()}
    return values | {f"buffer/mean_tokens/{name}": mean for name, mean in stats.mean_tokens.items()}


def _of_sources(store: BufferStore) -> dict[str, float]:
    """Of each: prompts drawn, its share since the ratios were last changed, and how its newest groups did."""
    draws, values = store.ledger.draws, dict[str, float]()
    total = draws.in_stretch.total()
    for name in store.cursor.sources.names:
        values[f"buffer/source/{name}/drawn"] = float(draws.taken[name])
        values[f"buffer/source/{name}/share"] = draws.in_stretch[name] / total if total else 0.0
        if (reward := store.finished.mean_of_source(name)) is not None:
            values[f"buffer/source/{name}/reward"] = reward
    return values


def inventory(store: BufferStore) -> str:
    """What became of the data, in words."""
    dropped = store.ledger.tally.dropped
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    left_out = f", {sum(dropped.values())} groups left out ({reasons})" if dropped else ""
    return f"{store.ledger.next_draw} prompts drawn{left_out}"
