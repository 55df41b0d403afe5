"""Sinks by name: built-in, by "module:attr", or by an installed package's entry point in the group `myxa.sinks`.

Whatever is named must be callable without arguments and give a `Sink`; that is checked before the run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from ...core.errors import ConfigError, UserCodeError
from ...core.registry import load_callable
from ...core.sink import Sink
from .chrome_trace import ChromeTraceSink
from .jsonl import JsonlSink
from .prometheus import PrometheusSink
from .tensorboard import TensorBoardSink

ENTRY_POINT_GROUP = "myxa.sinks"

BUILT_IN: dict[str, Callable[[], Sink]] = {
    "jsonl": JsonlSink,
    "chrome_trace": ChromeTraceSink,
    "tensorboard": TensorBoardSink,
    "prometheus": PrometheusSink,
}

_METHODS = ("open", "write", "flush", "close")


def choose_sinks(
    *, tensorboard: bool = True, prometheus_port: int = 0, trace: bool = True, extra: Sequence[str] = ()
) -> list[Sink]:
    """The sinks of a run, as its `[monitor]` section says. `extra`: names for `make_sink`."""
    sinks: list[Sink] = [JsonlSink()]
    if trace:
        sinks.append(ChromeTraceSink())
    if tensorboard:
        sinks.append(TensorBoardSink())
    if prometheus_port >= 0:
        sinks.append(PrometheusSink(prometheus_port))
    return sinks + [make_sink(name) for name in extra]


def make_sink(name: str) -> Sink:
    """A new sink. Raises ConfigError for an unknown name, UserCodeError when what it names is not a sink."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    factory = load_callable(name, where="sink") if ":" in name else _by_entry_point(name)
    try:
        sink = factory()
    except Exception as error:
        raise UserCodeError(f"sink {name!r}: making it raised {type(error).__name__}: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(sink, method, None))]
    if missing or not isinstance(getattr(sink, "name", None), str):
        lacks = ", ".join(f"{method}()" for method in missing) or "a name (str)"
        raise UserCodeError(
            f"sink {name!r} gave a {type(sink).__name__}, which lacks {lacks}", remedy="see myxa.core.sink.Sink"
        )
    return sink


def _by_entry_point(name: str) -> Callable[[], Any]:
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        raise ConfigError(f"no sink is called {name!r}", remedy=f'known are {known}; own code is named "module:attr"')
    return load_callable(installed[name].value, where=f"sink {name!r} (an entry point)")
