"""Our HTTP server beside a real SGLang: the same raw calls, the recorded answers of the real one as the measure.

Statuses are equal, and every field that a real answer has is in ours, except where DELIBERATE says why not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.engines.contract_subjects import OPTIONS, RECORDINGS, make_versions
from tests.engines.route_probes import aborted_children, answers, calls

from myxa.actors.engines.http_server import serve

FACTS = {
    "context_length", "max_running_requests", "max_total_num_tokens", "incremental_streaming_output", "internal_states",
}  # fmt: skip
"""What of a real server's hundreds of facts ours tells; myxa reads no others."""
DELIBERATE: Mapping[str, tuple[int, str]] = {
    "stop token outside": (400, "an id that no token has is a mistake; SGLang lets it pass"),
    "unknown sampling wish": (400, "the caller's mistake, not the server's (SGLang: 500)"),
    "temperature of words": (400, "the caller's mistake, not the server's (SGLang: 500)"),
    "lists of unequal length": (400, "the caller's mistake, not the server's (SGLang: 500)"),
}
"""Name of the call -> our status, and why it is another one."""
UNKNOWN_FIELDS = {
    "response_sent_to_client_ts": "a clock of the server's own host", "embedding": "of other kinds of models",
    "cache": "there is none", "param": "always null", "object": "errors have one form here",
}  # fmt: skip
LABELS = sorted(path.parent.name for path in RECORDINGS.glob("*/probes.json"))
CHANGES = {
    "text", "e2e_latency", "id", "message", "output_token_logprobs", "weight_versions", "model_path", "tokenizer_path",
    "cached_tokens", "cached_tokens_details",
}  # fmt: skip
"""Fields whose values are not compared: free text, clocks, random ids, floats, a cache that ours has not. Greedy tokens
are."""


def test_there_are_recordings():
    assert LABELS, "record with run_sglang.py --record"


@pytest.mark.parametrize("label", LABELS)
async def test_our_routes_answer_as_the_real_ones(label: str, tmp_path: Path):
    versions = make_versions(tmp_path / "models")
    is_incremental = "incremental" in label
    recorded = json.loads((RECORDINGS / label / "probes.json").read_text(encoding="utf-8"))
    async with serve(versions[0], options=OPTIONS, is_incremental=is_incremental) as served:
        ours = await answers(served.url, calls(tmp_path / "models"))
        aborts = await aborted_children(served.url)
    assert ours.keys() == recorded["answers"].keys(), "the calls are others now: record again"
    different = [line for name, real in recorded["answers"].items() for line in differences(name, real, ours[name])]
    assert not different, "\n" + "\n".join(different)
    assert aborts == recorded["aborts"]


def differences(name: str, real: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    if name in DELIBERATE:
        status, why = DELIBERATE[name]
        return (
            [] if mine["status"] == status != real["status"] else [f"{name}: {mine['status']}; deliberate was: {why}"]
        )
    if mine["status"] != real["status"]:
        return [
            f"{name}: {mine['status']} instead of {real['status']}: {mine['text'][:200]} instead of {real['text'][:200]}"
        ]
    if real["status"] >= 400 and "success" not in real["text"]:
        return [] if message(mine) else [f"{name}: an error without a message: {mine['text'][:200]}"]
    if "json" not in real["type"] and "event-stream" not in real["type"]:
        return []
    theirs, ours = objects(real["text"]), objects(mine["text"])
    if name == "server info":  # the names of its facts only
        return [f"{name}: {fact}" for fact in FACTS if fact not in theirs[0] or fact not in ours[0]]
    if is_stream(real):  # chunks are cut by time; how streams end is compared
        theirs, ours = ends(theirs), ends(ours)
    return [f"{name}: {line}" for line in missing(theirs, ours, "")]


def is_stream(answer: Mapping[str, Any]) -> bool:
    return "event-stream" in answer["type"]


def objects(text: str) -> list[Any]:
    """Of a stream, or the one value of a body."""
    if not text.startswith("data:"):
        return [json.loads(text)]
    lines = [line.removeprefix("data:").strip() for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ends(chunks: list[Any]) -> list[Any]:
    """The last chunk of each prompt's stream."""
    last = {chunk.get("index", 0): chunk for chunk in chunks}
    return [last[index] for index in sorted(last)]


def message(answer: Mapping[str, Any]) -> str:
    if "json" not in answer["type"]:
        return answer["text"]
    value = json.loads(answer["text"])
    return str(value.get("detail") or value.get("message") or value["error"]["message"])


def missing(real: Any, mine: Any, path: str) -> list[str]:
    """What the real value has and ours has not, or has otherwise."""
    if isinstance(real, dict):
        if not isinstance(mine, dict):
            return [f"{path} is no object"]
        lines: list[str] = []
        for name, value in real.items():
            if name in UNKNOWN_FIELDS:
                continue
            if name not in mine:
                lines.append(f"{path}.{name} is missing")
            elif name not in CHANGES:
                lines.extend(missing(value, mine[name], f"{path}.{name}"))
        return lines
    if isinstance(real, list):
        if not isinstance(mine, list) or len(real) != len(mine):
            return [f"{path} has another length"]
        return [line for i, (a, b) in enumerate(zip(real, mine, strict=True)) for line in missing(a, b, f"{path}[{i}]")]
    return [] if real == mine or isinstance(real, float) else [f"{path} is {mine!r} instead of {real!r}"]
