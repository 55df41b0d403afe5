"""The command line of a launched server, and what a run asks of servers that depends on how they were started.

Names in `[sglang]` are those of ServerArgs. The preflight check compares them with the installed SGLang's source
(`launch/checks/node.py`); SGLang's own parser judges the values, and its words are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ....core.errors import ConfigError

MODULE = "sglang.launch_server"


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Arguments for the server, by names of ServerArgs. What is false, and empty arrays, are left out."""
    words: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, list | tuple):
            items = [_word(item) for item in cast("list[Any]", value)]
            words += [flag, *items] if items else []
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words.append(f"{flag}={_word(value)}")
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list | tuple) else str(value)


def check_sizes(values: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """The parallel sizes to start with: `tp_size` is filled up to the actor's GPUs when it is left out. Raises
    ConfigError when the sizes do not need exactly the actor's GPUs. Without GPUs nothing is checked; sizes that are no
    numbers are left to SGLang."""
    if not num_devices or not all(isinstance(values.get(f"{size}_size", 1), int) for size in ("tp", "pp", "dp")):
        return {}
    shards = max(values.get("pp_size", 1), 1)
    replicas = 1 if values.get("enable_dp_attention") else max(values.get("dp_size", 1), 1)
    tp_size = values.get("tp_size", num_devices // (shards * replicas))
    needed = tp_size * shards * replicas
    if needed != num_devices:
        raise ConfigError(
            f"[sglang]: tp_size {tp_size} x pp_size {shards} x {replicas} replicas need {needed} GPUs, each rollout "
            f"actor has {num_devices}",
            remedy="change the sizes, or roles.rollout.devices and roles.rollout.count",
        )
    return {"tp_size": tp_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangNeeds:
    """What the run file says; the defaults are met by every server."""

    tokenizer: bool = False
    """Texts and end tokens are looked at by the server: `rollout.stop`, `rollout.min_new_tokens`."""
    seeds: bool = False
    """It draws by each request's own seed: `rollout.deterministic`."""

    def check(self, facts: Mapping[str, Any], place: str) -> None:
        """`facts`: of `/server_info`. Raises ConfigError for a server that says that it cannot; one that says nothing
        about it (another version, another server) is believed until it refuses a request."""
        if self.tokenizer and facts.get("skip_tokenizer_init") is True:
            raise ConfigError(
                f"{place}: was started with --skip-tokenizer-init, and stop strings or min_new_tokens are asked for",
                remedy="start it without, or leave rollout.stop and rollout.min_new_tokens out",
            )
        if self.seeds and facts.get("enable_deterministic_inference") is False:
            raise ConfigError(
                f"{place}: was started without --enable-deterministic-inference, so requests' seeds mean nothing to it",
                remedy="start it with that, or set rollout.deterministic = false",
            )


NO_NEEDS = SglangNeeds()
