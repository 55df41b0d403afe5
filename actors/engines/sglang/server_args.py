"""The command line of a launched server, and what a run asks of servers that depends on how they were started.

Names in `[sglang]` are those of ServerArgs. The preflight check compares them with the installed SGLang's source
(`launch/checks/node.py`); SGLang's own parser judges the values, and its words are shown.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ....core.config.servers import NOT_WITH_ADAPTERS, OFF, ServerShape, guesser, speculation_conflicts
from ....core.errors import ConfigError
from ....core.weight_channel import WRITTEN_CHANNELS
from .wire import ALWAYS_SAID, whole_number

MODULE = "sglang.launch_server"


def tools_path(env: Mapping[str, str], python: str) -> str:
    """PATH of a server: the role's, then its interpreter's folder, where pip puts `ninja`, which compiles kernels."""
    return os.pathsep.join(filter(None, (env.get("PATH", os.defpath), python.rpartition(os.sep)[0])))


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Arguments for the server, by names of ServerArgs. What is false, and empty arrays, are left out."""
    arguments: list[str] = []
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, list | tuple):
            items = [_word(item) for item in cast("list[Any]", value)]
            arguments += [flag, *items] if items else []
        elif isinstance(value, bool):
            arguments += [flag] if value else []
        else:
            arguments.append(f"{flag}={_word(value)}")
    return arguments


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list | tuple) else str(value)


def check_sizes(shape: ServerShape, num_devices: int, num_experts: int | None = None) -> dict[str, Any]:
    """The parallel sizes to start with: `tp_size` is filled up to the server's GPUs when it is left out. `num_experts`:
    of each layer of the model, None: not known here. Raises ConfigError when the sizes do not need exactly the server's
    GPUs, or divide what they cannot. Without GPUs nothing is checked."""
    if not num_devices:
        return {}
    outer = {size: shape.size(size) for size in shape.outer_sizes}
    filled = {"tp_size": num_devices // shape.size(*outer), **shape.table}
    shape = dataclasses.replace(shape, table=filled)
    tp_size, replicas = shape.size("tp_size"), shape.size("dp_size")
    if shape.num_gpus != num_devices:
        raise ConfigError(
            f"[{shape.key}]: {' x '.join(f'{size} {shape.size(size)}' for size in ('tp_size', *outer))} need "
            f"{shape.num_gpus} GPUs, each server has {num_devices}",
            remedy="change the sizes, or roles.rollout.devices and roles.rollout.count",
        )
    if filled.get("enable_dp_attention") and tp_size % replicas:
        raise ConfigError(
            f"[{shape.key}]: dp_size {replicas} does not divide tp_size {tp_size}: with enable_dp_attention the "
            f"replicas of attention share the {tp_size} tensor-parallel ranks",
            remedy="make tp_size a multiple of dp_size",
        )
    _check_experts(shape, num_experts)
    return {"tp_size": tp_size}


def _check_experts(shape: ServerShape, num_experts: int | None) -> None:
    """Ranks that share experts are among the tensor-parallel ones. Raises ConfigError."""
    backend, tp_size = str(shape.table.get("moe_a2a_backend", "none")), shape.size("tp_size")
    spans_all = backend not in ("none", "ascend_tp")  # SGLang 0.5.17 sets ep_size to tp_size
    ep_size = tp_size if spans_all else shape.size("ep_size")
    ways, spare = ep_size * shape.size("moe_dp_size"), shape.table.get("ep_num_redundant_experts", 0)
    cause, remedy = "", f"set ep_size to a divisor of both tp_size and {num_experts or 'the number of experts'}"
    if num_experts == 0 and (ep_size > 1 or backend != "none"):
        cause, remedy = "the model has no experts", "leave ep_size and moe_a2a_backend out"
    elif tp_size % ways:
        cause = f"with moe_dp_size it makes {ways} ranks, which do not divide tp_size {tp_size}"
    elif num_experts and isinstance(spare, int) and (num_experts + spare) % ep_size:
        cause = f"it does not divide the {num_experts + spare} experts of a layer"
    if cause:
        raise ConfigError(f"[{shape.key}]: ep_size {ep_size}: {cause}", remedy=remedy)


BACKEND_MODULES: Mapping[str, Mapping[str, str]] = {
    "moe_a2a_backend": {
        "deepep": "deep_ep", "mooncake": "mooncake", "nixl": "nixl_ep", "mori": "mori", "pplx": "pplx_kernels",
    },
    "disaggregation_transfer_backend": {
        "nixl": "nixl", "mooncake": "mooncake", "mooncake_tcp": "mooncake", "mori": "mori",
        "ascend": "memfabric_hybrid",
    },
    # To capture graphs of a draft's passes it imports the sparse attention of another family, and that imports this.
    "speculative_algorithm": {
        "NGRAM": "sglang", **dict.fromkeys(("NEXTN", "EAGLE", "EAGLE3", "STANDALONE"), "deep_gemm"),
    },
}  # fmt: skip
"""ServerArgs field -> its value -> the module that it needs beside SGLang."""
NO_GRAPHS = ("disable_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_backend_decode")


def needed_modules(values: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """Those of `BACKEND_MODULES` that servers with these arguments look for."""
    has_graphs = not any(values.get(name) in (True, "disabled") for name in NO_GRAPHS)
    return {name: modules for name, modules in BACKEND_MODULES.items() if has_graphs or name != "speculative_algorithm"}


PAIR_DEFAULTS: Mapping[str, Any] = {"disaggregation_transfer_backend": "mooncake"}
"""SGLang's own, of prefill and decode servers."""


# -- tokens that are guessed ahead -------------------------------------------------------------------------------------
#
# What weight updates do in SGLang 0.5.17, by its source. Each guess is judged by the model's weights of that moment, so
# stale drafts cost speed and change nothing that is drawn. Embedding and head are the model's own memory.
#
#     who guesses            broadcasts (nccl)    handles (cuda_ipc)                    folders (disk)
#     n-grams                the model            the model                             end the server
#     layers of the model    the model alone      the model and they                    the model and they
#     another model          the model alone      that one is overwritten, unless       that one is overwritten
#                                                 `disable_draft_model` is said

Guesses = Literal["", "ngram", "layers", "model"]


def guesses_by(values: Mapping[str, Any]) -> Guesses:
    """What guesses tokens. `values`: arguments with `model_path`, or `/server_info`."""
    name, draft = guesser(values), values.get("speculative_draft_model_path")
    if name in ("", "NGRAM"):
        return "ngram" if name else ""
    has_own_layers = name in ("NEXTN", "EAGLE") and draft in (None, "", values.get("model_path"))
    return "layers" if has_own_layers and not values.get("enable_multi_layer_eagle") else "model"


def reserved_tokens(facts: Mapping[str, Any]) -> int:
    """Of a server's context, those that SGLang 0.5.17 keeps for drafts: it refuses a request that needs them."""
    width, depth = (whole_number(facts, f"speculative_{name}") for name in ("eagle_topk", "num_steps"))
    num_drafts = max(width * depth, whole_number(facts, "speculative_num_draft_tokens"))
    return num_drafts if guesses_by(facts) in ("layers", "model") else 0


def check_guesses(values: Mapping[str, Any], channel: str) -> None:
    """Raises ConfigError where new weights cannot come by this channel (`weights.channel`; empty: none come)."""
    by = guesses_by(values)
    if channel in WRITTEN_CHANNELS and by in ("ngram", "model"):
        setting = "overwrites its draft with the policy" if by == "model" else "ends"
        raise ConfigError(
            f"sglang.speculative_algorithm = {guesser(values)}: SGLang {setting} when new weights come as folders "
            f'(weights.channel = "{channel}")',
            remedy='use weights.channel "nccl" or "cuda_ipc" (name the GPUs of both roles), or guess with NEXTN',
        )


def stale_guesses(values: Mapping[str, Any], channel: str, *, trains_layers: bool = False) -> str:
    """Why what guesses does not learn with the policy; empty: it does, or it is no model."""
    by = guesses_by(values)
    if by not in ("layers", "model") or not channel or (by == "layers" and trains_layers and channel != "nccl"):
        return ""
    why = "the draft is a model of its own, which is not trained"
    if by == "layers":
        why = "MTP layers are not trained"
    if by == "layers" and trains_layers:
        why = 'weights.channel = "nccl" brings weights into the model alone ("cuda_ipc" and "disk" into MTP layers too)'
    return f"{why}: the more the policy learns, the fewer guesses are taken; what is drawn stays right"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangNeeds:
    """What the run file says; the defaults are met by every server."""

    tokenizer: bool = False
    """Texts and end tokens are looked at by the server: `rollout.stop`, `rollout.min_new_tokens`."""
    seeds: bool = False
    """It draws by each request's own seed: `rollout.deterministic`."""

    channel: str = ""
    """Way of new weights; empty: none ever come."""
    trains_layers: bool = False
    """`megatron.mtp`."""
    adapter_rank: int = 0
    """It holds adapters of so many: `lora.rollout = "adapter"`; 0: none."""
    adapted: tuple[str, ...] = ()
    """Ends of the names of the matrices that they are of."""

    def own_arguments(self) -> dict[str, Any]:
        """ServerArgs of a launched server that are these needs."""
        adapters = {
            "enable_lora": True, "max_lora_rank": self.adapter_rank, "lora_target_modules": list(self.adapted)
        }  # fmt: skip
        return {"skip_tokenizer_init": not self.tokenizer, **(adapters if self.adapter_rank else {})}

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
        for name, why in self._arguments_against(facts):
            raise ConfigError(
                f"{place}: was started with {name} = {facts[name]}: {why}",
                remedy=f"start it without --{name.replace('_', '-')}",
            )
        for conflict in speculation_conflicts(facts):
            name = conflict.path.removeprefix("sglang.")
            raise ConfigError(f"{place}: {name} = {facts.get(name)}: {conflict.cause}", remedy="start it otherwise")
        for holds, cause, remedy in (
            (self.seeds, "what is drawn depends on what was guessed", "rollout.deterministic = false"),
            (self.adapter_rank, NOT_WITH_ADAPTERS, 'lora.rollout = "merged"'),
        ):
            if holds and guesser(facts):
                raise ConfigError(
                    f"{place}: guesses tokens ahead ({guesser(facts)}): {cause}",
                    remedy=f"start it without --speculative-algorithm, or set {remedy}",
                )
        check_guesses(facts, self.channel)
        modules, rank = facts.get("lora_target_modules"), facts.get("max_lora_rank")
        names = {*map(str, cast("list[Any]", modules))} if isinstance(modules, list) else {"all"}
        has_modules = {"all", "all-linear"} & names or set(self.adapted) <= names
        is_enough = has_modules and (not isinstance(rank, int) or rank >= self.adapter_rank)
        if self.adapter_rank and not (facts.get("enable_lora") is True and is_enough):
            expected = " ".join(command_line(self.own_arguments() | {"skip_tokenizer_init": False}))
            raise ConfigError(
                f"{place}: cannot hold the run's adapters",
                remedy=f'start it with {expected}, or set lora.rollout = "merged"',
            )

    def _arguments_against(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """ServerArgs that the run does not go with, and why."""
        preferred = facts.get("preferred_sampling_params")
        names = set(cast("dict[str, Any]", preferred)) - set(ALWAYS_SAID) if isinstance(preferred, dict) else ()
        if names:
            yield "preferred_sampling_params", f"it would set {', '.join(sorted(names))} of requests that say none"
        if not self.channel:
            return
        version = [int(number) for number in re.findall(r"\d+", str(facts.get("version", "")))[:3]]
        for name in KEPT_BY_TOKENS if version < STORED_BY_KEY else ():
            if facts.get(name) not in (None, *OFF):
                yield name, "its cache is found by tokens alone, and would answer with what older weights left"
        if facts.get("tokenizer_worker_num", 1) not in (0, 1):
            yield "tokenizer_worker_num", "of several processes, one alone hears of a new weight version"
        is_written = self.channel in WRITTEN_CHANNELS or facts.get("enable_dp_attention")
        if not is_written and whole_number(facts, "dp_size") > 1:
            yield "dp_size", f'SGLang takes weights from devices (weights.channel = "{self.channel}") into one replica'


NO_NEEDS = SglangNeeds()
KEPT_BY_TOKENS = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
STORED_BY_KEY = [0, 5, 23]
"""SGLang that keeps apart there what requests keep apart by `extra_key`."""
