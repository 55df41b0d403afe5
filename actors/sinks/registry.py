"""Sinks by name: built-in, by "module:attr", or by an installed package's entry point in the group `myxa.sinks`.

Whatever is named is called with the options of the run file as named arguments and must give a `Sink`; both are checked
before the run starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError, UserCodeError
from ...core.import_path import load_callable
from ...core.sink import Sink
from ...core.suggestion import suggest
from ..monitor.sink_thread import BesideSink
from .chrome_trace import ChromeTraceSink
from .jsonl import JsonlSink
from .names import SHIPPED, check_name, installed
from .prometheus import PrometheusSink
from .tensorboard import TensorBoardSink

BUILT_IN: dict[str, Callable[[], Sink]] = {
    "jsonl": JsonlSink,
    "chrome_trace": ChromeTraceSink,
    "tensorboard": TensorBoardSink,
    "prometheus": PrometheusSink,
}

_METHODS = ("open", "write", "flush", "close")


def choose_sinks(
    *,
    tensorboard: bool = True,
    prometheus_port: int = 0,
    prometheus_key: str = "",
    trace: bool = True,
    extra: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    otlp_endpoint: str = "",
    samples_bytes: int = 256 << 20,
) -> list[Sink]:
    """The sinks of a run, as its `[monitor]` section says. `extra`: names for `make_sink`, each fed by its own
    thread; `options`: name -> named arguments; `otlp_endpoint`: of an OpenTelemetry collector; `samples_bytes`: of
    prompts and answers that are kept."""
    sinks: list[Sink] = [JsonlSink(samples_bytes)]
    if trace:
        sinks.append(ChromeTraceSink())
    if tensorboard:
        sinks.append(TensorBoardSink())
    if prometheus_port >= 0:
        sinks.append(PrometheusSink(prometheus_port, prometheus_key))
    if otlp_endpoint:
        from .otlp import OtlpSink

        sinks.append(BesideSink(OtlpSink(otlp_endpoint)))
    return sinks + [BesideSink(make_sink(name, (options or {}).get(name, {}))) for name in extra]


def make_sink(name: str, options: Mapping[str, Any] | None = None) -> Sink:
    """A new sink. Raises ConfigError for an unknown name or option, UserCodeError when what it names is not a sink."""
    factory: Callable[..., Any]
    if name in BUILT_IN:
        factory = BUILT_IN[name]
    elif ":" in name:
        factory = load_callable(name, where="sink")
    else:
        factory = load_callable(SHIPPED[name], where="sink") if name in SHIPPED else _by_entry_point(name)
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


def _by_entry_point(name: str) -> Callable[..., Any]:
    check_name(name)
    return load_callable(installed()[name], where=f"sink {name!r} (an entry point)")
