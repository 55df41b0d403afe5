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

CANNOT: Mapping[str, str] = {
    "disaggregation": "a launched server answers requests alone; start servers with prefill-decode disaggregation "
    "yourself and name them in engine.attach",
    "encoder_": "a launched server answers requests alone; start such servers yourself and name them in engine.attach",
    "language_only": "a launched server answers requests alone; start such servers yourself and name them in "
    "engine.attach",
    "enable_lora": "the trainer publishes whole weights, never adapters",
    "lora_": "the trainer publishes whole weights, never adapters",
    "max_lora": "the trainer publishes whole weights, never adapters",
    "is_embedding": "a run needs servers that generate",
    "grpc_mode": "requests and control go over HTTP",
    "smg_grpc_mode": "requests and control go over HTTP",
    "ssl_": "a launched server speaks plain HTTP on loopback",
    "enable_ssl": "a launched server speaks plain HTTP on loopback",
    "fastapi_root_path": "routes are asked for at the server's root",
    "enable_multimodal": "prompts and samples are text",
    "chat_template": "prompts are rendered by the run, token ids travel; set data.chat_template",
    "preferred_sampling_params": "each request says how it is sampled; set [rollout]",
    "revision": "model.path is a folder; download that revision into it",
}
"""Beginning of a ServerArgs field -> why a run cannot do what it asks for, and what to do instead. The empty value, or
what switches it off, says nothing and is allowed."""
OFF = (False, "", "null", 0)


def owned_conflicts(table: Mapping[str, Any]) -> Iterator[Conflict]:
    """One per key of `[sglang]` that is not the user's to set, and per value that no argument can have."""
    for key, value in table.items():
        if key in OWNED:
            yield Conflict((f"sglang.{key}",), f"is myxa's own; {OWNED[key]}")
        elif value not in OFF and (why := _why_not(key)):
            yield Conflict((f"sglang.{key}",), f"is nothing that a run can do: {why}")
        elif not _is_argument(value):
            yield Conflict((f"sglang.{key}",), "must be text, a number, a boolean, or an array or table of those")


def _why_not(key: str) -> str:
    return next((why for start, why in CANNOT.items() if key.startswith(start)), "")


def _is_argument(value: object) -> bool:
    array, table = as_array(value), as_table(value)
    if array is not None:
        return all(_is_argument(item) for item in array)
    if table is not None:
        return all(_is_argument(item) for item in table.values())
    return isinstance(value, str | bool | int | float)
