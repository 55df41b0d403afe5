"""`myxa trace`: the last stretch of the timeline as one file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .output import Verbs, add_run_flags, show
from .stretch import stretch_s
from .which_run import client_or_folder


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("trace", help="the timeline up to now, for ui.perfetto.dev")
    parser.add_argument("--last", type=stretch_s, default=None, metavar="T", dest="last_s",
                        help="only the last so many seconds: 60s, 5min (everything)")  # fmt: skip
    parser.add_argument("-o", type=Path, default=Path("trace.json"), metavar="FILE", dest="to",
                        help="where to write it (%(default)s)")  # fmt: skip
    add_run_flags(parser)
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    source = _source(options)
    import orjson  # slow to import, and the last thing needed

    from ...actors.sinks.chrome_trace import read_trace, trace_parts
    from ..views.trace_tail import trace_tail

    target: Path = options.to
    parts = {part: part.stat().st_size for part in trace_parts(source)}  # a live run goes on writing meanwhile
    if target.resolve() in {part.resolve() for part in parts}:
        raise ConfigError(f"{target} is the run's own trace", remedy="write to another file: -o FILE")

    def read() -> Iterator[dict[str, Any]]:
        return chain.from_iterable(read_trace(part, num_bytes) for part, num_bytes in parts.items())

    events = trace_tail(read, options.last_s)
    try:
        target.write_bytes(b"[\n" + b",\n".join(orjson.dumps(event) for event in events) + b"\n]\n")
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}", remedy="name another file: -o FILE"
        ) from error
    show(options, {"file": str(target), "num_events": len(events)}, _words)
    return 0


def _source(options: argparse.Namespace) -> Path:
    """The trace of a live run, written up to now; or that of a run that is over."""
    found = client_or_folder(options)
    if not isinstance(found, Path):
        return Path(found.ask("trace")["file"])
    path = found / "trace.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path}", remedy="it is written with monitor.trace = true")
    return path


def _words(told: dict[str, Any]) -> str:
    return f"{told['num_events']} events in {told['file']}: open it in https://ui.perfetto.dev or chrome://tracing"
