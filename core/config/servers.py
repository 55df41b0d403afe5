"""SGLang servers that a run launches: the arguments of `[sglang]` that are its own or that it cannot honour, and
`[engine.groups]`. SGLang is not imported: names are compared with its source where the server will be
(`launch/checks/node.py`), and its own parser judges the values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ..suggestion import nearest
from .section import Conflict, Section, Table, as_array, as_table, clashes

GroupKind = Literal["regular", "prefill", "decode"]


class GroupSettings(Section, frozen=True):
    """Servers of one kind and shape, for rollout actors that launch several. `NAME` is its own: letters, digits, `_`,
    `-`, at most 64. Each regular server has a rollout actor, all prefill and decode servers together one."""

    kind: GroupKind = "regular"
    """regular, or prefill (reads prompts) and decode (writes the answers, from the cache that it is sent)."""
    servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers of this group."""
    sglang: Table = {}
    """Their own arguments, over those of `[sglang]`. Each server has `tp_size * pp_size * dp_size` GPUs (without
    `dp_size` under `enable_dp_attention`) of the actor's, in the order of groups."""


@dataclass(frozen=True, slots=True)
class ServerShape:
    """One server that a rollout actor launches."""

    kind: GroupKind
    key: str
    """Of the run file: where its arguments are."""
    table: Mapping[str, Any]
    """ServerArgs field -> value."""

    @property
    def outer_sizes(self) -> tuple[str, ...]:
        """Those that make processes beside the tensor-parallel ranks."""
        return ("pp_size",) if self.table.get("enable_dp_attention") else ("pp_size", "dp_size")

    @property
    def num_gpus(self) -> int:
        return self.size("tp_size", *self.outer_sizes)

    def size(self, *names: str) -> int:
        """The product of these sizes; one that is left out, or no number, is 1."""
        sizes = [self.table.get(name, 1) for name in names]
        return math.prod(max(size, 1) for size in sizes if isinstance(size, int))


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
    "random_seed": "set run.seed",
    "device": "set roles.rollout.devices",
    "base_gpu_id": "set roles.rollout.devices",
    "gpu_id_step": "set roles.rollout.devices",
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"), "attach to a server of several nodes with engine.attach"
    ),
    "config": "write the arguments into [sglang]",
}
"""ServerArgs field -> what to do instead of setting it in `[sglang]`."""

_ALONE = "a launched server answers requests alone; start such servers yourself and name them in engine.attach"
_GROUPS = 'make groups of servers, [engine.groups.NAME] with kind = "prefill" and kind = "decode"'
_ADAPTERS = 'set lora.rank and lora.rollout = "adapter"'
CANNOT: Mapping[str, str] = {
    **dict.fromkeys(("encoder_", "language_only"), _ALONE),
    **dict.fromkeys(("disaggregation_mode", "disaggregation_bootstrap_port"), _GROUPS),
    **dict.fromkeys(("enable_lora", "lora_paths", "lora_target", "max_lora_rank", "max_loaded_loras"), _ADAPTERS),
    "is_embedding": "a run needs servers that generate",
    **dict.fromkeys(("grpc_mode", "smg_grpc_mode"), "requests and control go over HTTP"),
    **dict.fromkeys(("ssl_", "enable_ssl"), "a launched server speaks plain HTTP on loopback"),
    "enable_dp_attention_local_control_broadcast": "ranks that are paused in different rounds wait for each other",
    "fastapi_root_path": "routes are asked for at the server's root",
    "enable_multimodal": "prompts and samples are text",
    "chat_template": "prompts are rendered by the run, token ids travel; set data.chat_template",
    "preferred_sampling_params": "each request says how it is sampled; set [rollout]",
    "revision": "say it in model.path, a hub id: org/name@revision",
}
"""Beginning of a ServerArgs field -> why a run cannot do what it asks for, and what to do instead. The empty value, or
what switches it off, says nothing and is allowed."""
OFF = (False, "", "null", 0)
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "moe_dp_size")
"""Numbers of ranks of a server."""


def owned_conflicts(table: Mapping[str, Any], place: str = "sglang") -> Iterator[Conflict]:
    """One per key of `[sglang]`, or of the table at `place`, that is not the user's to set, and per value that no
    argument can have."""
    for key, value in table.items():
        if key in OWNED:
            yield Conflict(f"{place}.{key}", f"is myxa's own; {OWNED[key]}")
        elif value not in OFF and (why := next((why for start, why in CANNOT.items() if key.startswith(start)), "")):
            yield Conflict(f"{place}.{key}", f"is nothing that a run can do: {why}")
        elif key in SIZES and (type(value) is not int or value < 0):
            yield Conflict(f"{place}.{key}", f"must be a whole number, is {value!r:.40}: GPUs are counted by it")
        elif not _is_argument(value):
            yield Conflict(f"{place}.{key}", "must be text, a number, a boolean, or an array or table of those")


NOT_WITH_ADAPTERS = "SGLang takes adapters with no guesses but those of NGRAM, and with those they were not tried yet"
GUESSERS = ("NGRAM", "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""SGLang's ways to guess tokens ahead whose answers come with the model's own log-probs."""


def guesser(table: Mapping[str, Any]) -> str:
    """`speculative_algorithm` as SGLang reads it; empty: no token is guessed."""
    return str(table.get("speculative_algorithm") or "").upper()


def speculation_conflicts(table: Mapping[str, Any]) -> Iterator[Conflict]:
    """What guessing tokens does not go with, by SGLang 0.5.17's source. `table`: `[sglang]` and where it runs, or what
    a server says of itself."""
    name, path = guesser(table), "sglang.speculative_algorithm"
    if not name:
        return
    near = nearest(name, GUESSERS)
    yield from clashes(
        (name not in GUESSERS, path,
         (f"must be one of {', '.join(GUESSERS)}{f'; did you mean {near}?' if near else ''}: others give no log-probs "
          "of the model with their answers")),
        (table.get("device") == "cpu", path,
         "needs a GPU: without one SGLang takes the likeliest token, whatever the temperature"),
        (name in ("EAGLE3", "STANDALONE") and not table.get("speculative_draft_model_path"),
         "sglang.speculative_draft_model_path", f"must name the folder of the draft model of {name}"),
        (table.get("pp_size", 1) not in (0, 1), path, "needs sglang.pp_size = 1: pipeline stages make no guesses"),
        (name in ("NGRAM", "STANDALONE") and table.get("enable_dp_attention"), path,
         f"{name} does not go with sglang.enable_dp_attention: SGLang refuses both together"),
        *((table.get(key, 1) != 1, f"sglang.{key}",
           "must be 1: below, guesses are taken more often than the model draws them, and log-probs do not say so")
          for key in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")),
    )  # fmt: skip


def _is_argument(value: object) -> bool:
    inner = as_array(value) or list((as_table(value) or {}).values())
    return all(map(_is_argument, inner)) and isinstance(value, str | bool | int | float | list | dict)
