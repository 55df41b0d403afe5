"""Names of sinks in the run file, and of curves where all actors share one list. Imports no sink."""

from __future__ import annotations

from importlib.metadata import entry_points

from ...core.errors import ConfigError
from ...core.suggestion import nearest

ENTRY_POINT_GROUP = "myxa.sinks"
BUILT_IN_NAMES = ("jsonl", "chrome_trace", "tensorboard", "prometheus")
SHIPPED: dict[str, str] = {
    "wandb": "myxa.actors.sinks.wandb_sink:WandbSink",
    "mlflow": "myxa.actors.sinks.mlflow_sink:MlflowSink",
}
"""As an entry point of a package would name them: imported when they are asked for. Each needs the package of its
name."""


def installed() -> dict[str, str]:
    """Name -> "module:attr" of what installed packages bring."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def check_name(name: str) -> None:
    """Raise ConfigError if no sink is called so."""
    known = sorted({*BUILT_IN_NAMES, *SHIPPED, *installed()})
    if ":" in name or name in known:
        return
    near = nearest(name, known)
    raise ConfigError(
        f"no sink is called {name!r}" + (f"; did you mean {near!r}?" if near else ""),
        remedy=f'known are {", ".join(known)}; own code is named "module:attr"',
    )


_ALONE = frozenset({"trainer/0", "coordinator", "buffer", "monitor"})
"""Actors whose metrics keep their names: there is one of each, or it speaks for the others."""


def curve_name(source: str, metric: str) -> str:
    """`train/loss` of trainer/0 stays; `rollout/running` of rollout/1 is `rollout.1/running`."""
    if source in _ALONE:
        return metric
    role = source.partition("/")[0]
    return f"{source.replace('/', '.')}/{metric.removeprefix(role + '/')}"
