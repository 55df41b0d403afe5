"""Which of SGLang's ServerArgs are myxa's own, and where their value comes from instead. Plain knowledge, no SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .conflict import Conflict
from .tables import as_array, as_table

OWNED: Mapping[str, str] = {
    "model_path": "set model.path",
    "tokenizer_path": "set model.path: token ids travel, the server needs no tokenizer",
    "skip_tokenizer_init": "leave it out: token ids travel, the server needs no tokenizer",
    "host": "leave it out: a launched server listens on loopback only",
    "port": "leave it out: a free port is taken",
    "admin_api_key": "leave it out: a key is made for every server",
    "api_key": "leave it out: a key is made for every server",
    "weight_version": "leave it out: versions are the trainer's",
    "incremental_streaming_output": "leave it out: streams are always incremental",
    "context_length": "set engine.context_length",
    "dtype": "set engine.dtype",
    "max_running_requests": "set engine.max_running",
    "random_seed": "set engine.seed or run.seed",
    "device": "set roles.rollout.devices",
    "base_gpu_id": "set roles.rollout.devices",
    "gpu_id_step": "set roles.rollout.devices",
    "nnodes": "attach to a server over several nodes with engine.attach",
    "node_rank": "attach to a server over several nodes with engine.attach",
    "dist_init_addr": "attach to a server over several nodes with engine.attach",
    "config": "write the arguments into [sglang]",
}
"""ServerArgs field -> what to do instead of setting it in `[sglang]`."""


def owned_conflicts(table: Mapping[str, Any]) -> Iterator[Conflict]:
    """One per key of `[sglang]` that is not the user's to set, and per value that no argument can have."""
    for key, value in table.items():
        if key in OWNED:
            yield Conflict((f"sglang.{key}",), f"is myxa's own; {OWNED[key]}")
        elif not _is_argument(value):
            yield Conflict((f"sglang.{key}",), "must be text, a number, a boolean, or an array or table of those")


def _is_argument(value: object) -> bool:
    array, table = as_array(value), as_table(value)
    if array is not None:
        return all(_is_argument(item) for item in array)
    if table is not None:
        return all(_is_argument(item) for item in table.values())
    return isinstance(value, str | bool | int | float)
