"""Sinks by name: built-in, by "module:attr", or by an installed package's entry point in the group `myxa.sinks`.

Whatever is named is called with the options of the run file as named arguments and must give a `Sink`; both are checked
before the run starts. Sinks are imported when they are made: some are large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from ...core.config.run import MonitorSettings
from ...core.errors import ConfigError, UserCodeError
from ...core.import_path import load_callable
from ...core.messages import MetricPoint
from ...core.sink import Sink
from ...core.suggestion import nearest, suggest

ENTRY_POINT_GROUP = "myxa.sinks"
BUILT_IN: dict[str, str] = {
    "jsonl": "myxa.actors.sinks.jsonl:JsonlSink",
    "chrome_trace": "myxa.actors.sinks.chrome_trace:ChromeTraceSink",
    "tensorboard": "myxa.actors.sinks.tensorboard:TensorBoardSink",
    "prometheus": "myxa.actors.sinks.prometheus:PrometheusSink",
}
SHIPPED: dict[str, str] = {
    "wandb": "myxa.actors.sinks.wandb_sink:WandbSink",
    "mlflow": "myxa.actors.sinks.mlflow_sink:MlflowSink",
}
"""Each needs the package of its name."""
_OURS = BUILT_IN | SHIPPED
_METHODS = ("open", "write", "flush", "close")


def choose_sinks(settings: MonitorSettings, *, prometheus_key: str = "") -> list[Sink]:
    """The sinks of a run."""
    from .jsonl import JsonlSink

    sinks: list[Sink] = [JsonlSink(settings.samples_mb << 20 if settings.samples_per_step else 0)]
    if settings.trace:
        sinks.append(make_sink("chrome_trace"))
    if settings.tensorboard:
        sinks.append(make_sink("tensorboard"))
    if settings.prometheus_port >= 0:
        sinks.append(make_sink("prometheus", {"port": settings.prometheus_port, "key": prometheus_key}))
    return sinks + [make_sink(name, settings.options.get(name, {})) for name in settings.sinks]


def make_sink(name: str, options: Mapping[str, Any] | None = None) -> Sink:
    """A new sink. Raises ConfigError for an unknown name or option, UserCodeError when what it names is not a sink."""
    if ":" in name or name in _OURS:
        factory = load_callable(_OURS.get(name, name), where="sink")
    else:
        check_name(name)
        factory = load_callable(installed()[name], where=f"sink {name!r} (an entry point)")
    _check_options(name, factory, options or {})
    try:
        sink = factory(**(options or {}))
    except ConfigError:
        raise
    except Exception as error:
        raise UserCodeError(f"sink {name!r}: making it raised {type(error).__name__}: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(sink, method, None))]
    if missing or not isinstance(getattr(sink, "name", None), str):
        lacks = ", ".join(f"{method}()" for method in missing) or "a name (str)"
        raise UserCodeError(
            f"sink {name!r} gave a {type(sink).__name__}, which lacks {lacks}", remedy="see myxa.core.sink.Sink"
        )
    return sink


def _check_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # made in C: it will say itself what it does not take
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            known = ", ".join(parameters) or "none"
            raise ConfigError(
                f"monitor.options.{name}: {option!r} is no option of this sink; {suggest(option, parameters)}",
                remedy=f"it takes {known}",
            )


def installed() -> dict[str, str]:
    """Name -> "module:attr" of what installed packages bring."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def check_name(name: str) -> None:
    """Raise ConfigError if no sink is called so."""
    known = sorted({*_OURS, *installed()})
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


def curves_of(point: MetricPoint) -> dict[str, float]:
    """Its metrics by the names that they have where all actors share one list, without its time accounting."""
    return {curve_name(point.source, name): v for name, v in point.values.items() if not name.startswith("time/")}
