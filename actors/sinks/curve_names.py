"""How a metric of an actor is called where all actors share one list of names. Pure."""

from __future__ import annotations

_ALONE = frozenset({"trainer/0", "coordinator", "buffer", "monitor"})
"""Actors whose metrics keep their names: there is one of each, or it speaks for the others."""


def curve_name(source: str, metric: str) -> str:
    """`train/loss` of trainer/0 stays; `rollout/running` of rollout/1 is `rollout.1/running`."""
    if source in _ALONE:
        return metric
    role = source.partition("/")[0]
    return f"{source.replace('/', '.')}/{metric.removeprefix(role + '/')}"
