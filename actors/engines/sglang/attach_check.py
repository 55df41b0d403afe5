"""Whether what answers at an address is a server that a run can attach to. Pure: answers in, a fault in words out.

Two routes are enough: `/model_info` (it answers while the server is paused too) and `/server_info`. The client of a
server (`http_client.py`) and the preflight check ask them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

MODEL_ROUTE, FACTS_ROUTE = "/model_info", "/server_info"
MODEL_FIELDS = ("model_path", "weight_version")
FACTS_FIELDS = ("model_path", "context_length", "internal_states", "max_running_requests", "max_total_num_tokens")
FIRST_VERSION = (0, 5)
"""Of SGLang, whose routes these are."""
MAX_QUOTED = 120
REMEDY = "mend engine.attach, or start an SGLang server there"
KEY_REMEDY = "set engine.key_env to the variable that holds the server's --admin-api-key"
LOADING = (500, 502, 503, 504)
"""A server that is loading, or a gateway in front of one."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What a GET was answered with."""

    route: str
    status: int = 0
    """0: nothing that is HTTP."""
    body: bytes = b""
    error: str = ""
    """Why there is no status."""
    is_absent: bool = False
    """Nothing listens there, or it does not answer in time: it may come."""
    is_silent: bool = False
    """It does not answer in time."""

    @property
    def value(self) -> Mapping[str, Any]:
        """Its JSON object; empty for anything else."""
        try:
            found = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def may_come(self) -> bool:
        """A later look may find it well."""
        return self.is_absent or self.status in LOADING

    def words(self) -> str:
        """What it was, for messages."""
        if not self.status:
            return f"GET {self.route}: {_quoted(self.error)}"
        text = _quoted(self.body[: 4 * MAX_QUOTED].decode("utf-8", "replace"))
        return f"GET {self.route} answered {self.status}{f': {text}' if text else ' with nothing'}"


def _quoted(text: str) -> str:
    """A stranger's words on one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_QUOTED]


def attach_fault(model: ServerAnswer, facts: ServerAnswer, model_type: str = "") -> tuple[str, str]:
    """Why a run cannot attach to a server that answered so, and the remedy; both empty: it can, as far as one sees.
    `model_type`: of the run's model folder."""
    for answer, fields in ((model, MODEL_FIELDS), (facts, FACTS_FIELDS)):
        if answer.status in (401, 403):
            return f"{answer.words()}: it asks for another key", KEY_REMEDY
        if answer.may_come:
            return answer.words(), "start the server, or mend engine.attach"
        if answer.status != 200 or not any(name in answer.value for name in fields):
            hint = "; if it speaks https, write https:// in engine.attach" if not answer.status else ""
            return f"{answer.words()}: this is no SGLang server{hint}", REMEDY
    version = str(facts.value.get("version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1][:6]), int(numbers[2][:6])) < FIRST_VERSION:
        return f"it is SGLang {version[:MAX_QUOTED]}, older than 0.5", "start a newer one"
    theirs = model.value.get("model_type")
    if model_type and isinstance(theirs, str) and theirs and theirs != model_type:
        place = str(model.value.get("model_path", ""))[:MAX_QUOTED]
        return (
            f"it serves a model of type {theirs[:MAX_QUOTED]!r} ({place}), the run's is of type {model_type!r}",
            "start it with the run's model folder, or mend model.path",
        )
    return "", ""
