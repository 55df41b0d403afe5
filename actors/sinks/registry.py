"""Sinks by name: built-in, or by "module:attr" or "file.py:attr".

Whatever is named is called with the options of the run file as named arguments and must give a `Sink`; both are checked
before the run starts. Sinks are imported when they are made: some are large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...core.config.run import MonitorSettings
from ...core.errors import ConfigError, UserCodeError
from ...core.sink import Sink
from ...core.suggestion import nearest, suggest
from ..user_code.functions import Expected, file_of, named_code

BUILT_IN: dict[str, str] = {
    "jsonl": "myxa.actors.sinks.jsonl:JsonlSink",
    "chrome_trace": "myxa.actors.sinks.chrome_trace:ChromeTraceSink",
    "tensorboard": "myxa.actors.sinks.trackers:TensorBoardSink",
}
SHIPPED: dict[str, str] = {
    "wandb": "myxa.actors.sinks.trackers:WandbSink",
    "mlflow": "myxa.actors.sinks.trackers:MlflowSink",
}
"""Each needs the package of its name."""
_OURS = BUILT_IN | SHIPPED
_EXPECTED = Expected("monitor.sinks", 0, "class Sink")
_METHODS = ("open", "write", "flush", "close")


def choose_sinks(settings: MonitorSettings) -> list[Sink]:
    """Each once, also one that is on by default and named all the same."""
    samples_bytes = settings.samples_mb << 20 if settings.samples_per_step else 0
    options = {"jsonl": {"samples_bytes": samples_bytes}} | settings.options
    names = {"jsonl": True, "chrome_trace": settings.trace, "tensorboard": settings.tensorboard}
    names |= dict.fromkeys(settings.sinks, True)
    return [make_sink(name, options.get(name)) for name, is_on in names.items() if is_on]


def make_sink(name: str, options: Mapping[str, Any] | None = None) -> Sink:
    """A new sink. Raises ConfigError for an unknown name or option, UserCodeError when what it names is not a sink."""
    check_name(name)
    factory = named_code(_OURS.get(name, name), _EXPECTED)
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
            option_names = ", ".join(parameters) or "none"
            raise ConfigError(
                f"monitor.options.{name}: {option!r} is no option of this sink; {suggest(option, parameters)}",
                remedy=f"it takes {option_names}",
            )


def check_name(name: str) -> None:
    """Raise ConfigError if no sink is called so."""
    module, colon, _ = name.rpartition(":")
    if module.endswith(".py"):
        file_of(module, _EXPECTED.key)
    if colon or name in _OURS:
        return
    near = nearest(name, _OURS)
    raise ConfigError(
        f"no sink is called {name!r}" + (f"; did you mean {near!r}?" if near else ""),
        remedy=f'known are {", ".join(sorted(_OURS))}; own code is named "module:Class" or "file.py:Class"',
    )
