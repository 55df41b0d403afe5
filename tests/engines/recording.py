"""Recordings of what a real server answered: how they are written, read and kept small.

A recording is a text file of JSON lines in the order in which things happened between one client and one server:

    {"n": 4, "in": "POST /generate", "body": {...}}         request 4 arrived
    {"n": 4, "head": 200, "type": "text/event-stream"}      its answer began
    {"n": 4, "out": "data: {...}"}                          bytes of it: one event of a stream, or a whole body
    {"n": 4, "out": [[0, 90], "73", [91, 200]]}             the same, told by what is new against the last `out` of 4
    {"n": 4, "end": "whole"}                                or "left" (the client went), or "broke" (the server did)
    {"get": "/model_info", "after": 2, "status": 200, ...}  what a question was answered after 2 control calls

Replayed bytes are the recorded ones, except that machine paths were replaced by names when they were written, and that
of `/server_info` only the facts in FACTS are kept.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FACTS = (
    "version", "context_length", "max_running_requests", "max_total_num_tokens", "dtype", "device", "tp_size",
    "attention_backend", "sampling_backend", "stream_interval", "incremental_streaming_output", "weight_version",
)  # fmt: skip
SITE = re.compile(r"/[^\s\"'\\]*/(?:site|dist)-packages/")
PIECE = re.compile(r"[^,]*,|[^,]+$")
Event = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Paths that a server and its client talk about, by the names they have in recordings."""

    roots: Mapping[str, Path]

    def hide(self, text: str) -> str:
        for name, root in self.roots.items():
            text = text.replace(str(root), f"<{name}>")
        return SITE.sub("<site>/", text)

    def show(self, text: str) -> str:
        for name, root in self.roots.items():
            text = text.replace(f"<{name}>", str(root))
        return text


def told_by_difference(old: str, new: str) -> list[Any]:
    """`new` as ranges of `old` and texts; cumulative streams repeat nearly everything with every token."""
    a, b = PIECE.findall(old), PIECE.findall(new)
    starts = [0]
    for piece in a:
        starts.append(starts[-1] + len(piece))
    parts: list[Any] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append([starts[i1], starts[i2]])
        elif kind != "delete":
            parts.append("".join(b[j1:j2]))
    return parts


def retold(old: str, parts: list[Any]) -> str:
    return "".join(part if isinstance(part, str) else old[part[0] : part[1]] for part in parts)


class Writer:
    """Collects the events of one recording."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._events: list[Event] = []
        self._num_requests = 0
        self._num_controls = 0
        self._last_get: dict[str, Event] = {}

    def arrived(self, method: str, path: str, body: bytes) -> int:
        self._num_requests += 1
        self._num_controls += path != "/generate"
        text = self._places.hide(body.decode("utf-8", "backslashreplace"))
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        self._events.append({"n": self._num_requests, "in": f"{method} {path}", "body": value})
        return self._num_requests

    def began(self, number: int, status: int, kind: str) -> None:
        self._events.append({"n": number, "head": status, "type": kind})

    def said(self, number: int, data: bytes) -> None:
        self._events.append({"n": number, "out": self._places.hide(data.decode())})

    def ended(self, number: int, how: str) -> None:
        self._events.append({"n": number, "end": how})

    def asked(self, path: str, status: int, kind: str, data: bytes) -> None:
        text = self._places.hide(data.decode())
        if path == "/server_info":
            facts: dict[str, Any] = json.loads(text)
            text = json.dumps({name: facts[name] for name in FACTS if name in facts}, separators=(",", ":"))
        answer = {"get": path, "status": status, "type": kind, "text": text}
        if self._last_get.get(path) != answer:
            self._last_get[path] = answer
            self._events.append(answer | {"after": self._num_controls})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in self._small_events())
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _small_events(self) -> Iterator[Event]:
        before: dict[int, str] = {}
        for event in self._events:
            if "out" not in event:
                yield event
                continue
            new, old = event["out"], before.get(event["n"])
            before[event["n"]] = new
            parts = new if old is None else told_by_difference(old, new)
            yield event | {"out": parts if len(json.dumps(parts)) < len(json.dumps(new)) else new}


@dataclass
class Exchange:
    """One recorded request and its answer."""

    number: int
    position: int
    """Of its arrival among all events."""
    request: str
    """"POST /generate"."""
    body: Any
    answer: list[tuple[int, Event]] = field(default_factory=list)
    """Positions and events, `out` always a text."""

    @property
    def key(self) -> str:
        return key_of(self.request, self.body)

    @property
    def outs(self) -> list[str]:
        return [event["out"] for _, event in self.answer if "out" in event]


MEANING = ("rid", "input_ids", "sampling_params", "stream", "return_logprob", "model_path", "weight_version")
"""Fields of bodies by which a request is known again; the others may change without a new recording."""


def key_of(request: str, body: Any) -> str:
    if not isinstance(body, dict):
        return f"{request} {body!r}"
    if request.endswith(("/generate", "/update_weights_from_disk")):
        body = {name: body.get(name) for name in MEANING}
    if request.endswith("/continue_generation"):  # its only field is about a cache of GPUs
        body = {}
    if isinstance(body.get("rid"), str):  # what our client adds to make it unique is new every time
        body = body | {"rid": body["rid"].partition("~")[0]}
    return f"{request} {json.dumps(body, sort_keys=True)}"


@dataclass
class Recording:
    """A recording, read."""

    path: Path
    exchanges: dict[int, Exchange]
    questions: list[Event]


def read_recording(path: Path) -> Recording:
    exchanges: dict[int, Exchange] = {}
    questions: list[Event] = []
    for position, event in enumerate(events_of(path)):
        if "get" in event:
            questions.append(event)
        elif "in" in event:
            exchanges[event["n"]] = Exchange(event["n"], position, event["in"], event["body"])
        else:
            exchange = exchanges[event["n"]]
            if isinstance(event.get("out"), list):
                event["out"] = retold(exchange.outs[-1], event["out"])
            exchange.answer.append((position, event))
    return Recording(path, exchanges, questions)


def events_of(path: Path) -> Iterator[Event]:
    for line in path.read_text(encoding="utf-8").split("\n"):  # not splitlines: answers hold exotic separators
        if line:
            yield json.loads(line)
