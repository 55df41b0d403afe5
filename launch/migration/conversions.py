"""From arguments of another program to values of the run file, by the words that `peers.table` uses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from .arguments import has_gap

Keys = dict[str, Any]
"""Key of the run file -> value. The key "" holds a sentence for the user's hand."""


class Hand(Exception):
    """The value cannot be taken over; the text says what to do."""


def scalar(value: Any) -> Any:
    """A number, truth value, list or table where a text is one."""
    if isinstance(value, list):
        return [scalar(item) for item in cast("list[Any]", value)]
    for read in (json.loads, float) if isinstance(value, str) else ():
        try:
            converted = read(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(converted, float) and not math.isfinite(converted) else converted
    return value


def as_list(value: Any) -> list[Any]:
    converted = scalar(value)
    return cast("list[Any]", converted) if isinstance(converted, list) else [converted]


def flag(value: Any) -> bool:
    if not isinstance(converted := scalar(value), bool):
        raise Hand("is neither true nor false")
    return converted


def function(value: Any) -> str:
    """`package.module.name` -> `package.module:name`."""
    module, _, name = str(value).rpartition(".")
    return f"{module}:{name}" if module else str(value)


SIMPLE: Mapping[str, Callable[[Any], Any]] = {
    "text": str, "value": scalar, "flag": flag, "function": function, "list": as_list,
    "filter": lambda value: "zero_variance" if "nonzero_std" in value else function(value),
    "paths": lambda value: cast("list[Any]", value) if isinstance(value, list) else str(value),
    "every": lambda value: max(scalar(value), 0),
    "mib": lambda value: max(1, scalar(value) // 2**20),
    "not": lambda value: not flag(value),
    "wandb": lambda value: ["wandb"] if scalar(value) is True or "wandb" in as_list(value) else None,
    "tensorboard": lambda value: "tensorboard" in as_list(value) or None,
}  # fmt: skip


# -- several arguments, in the order of their row; None: not given, and without a default ----------------------------


def staleness(program: str) -> Keys:
    """Synchronous programs are on-policy, others one step off."""
    return {"async.max_staleness": 1 if "async" in program or "off_policy" in program else 0}


def ends(steps: Any, passes: Any) -> Keys:
    return {"run.num_steps": steps} if steps is not None else {"run.num_steps": 0, "data.max_passes": passes}


def columns(loss: Any, column: Any, template: Any) -> Keys:
    """Supervised training learns from conversations."""
    if loss not in ("sft_loss", "policy_loss"):
        raise Hand("is a loss of your own: set algo.loss_fn")
    keys = {"algo.kind": "sft", "data.preset": "chat", "data.messages_key": str(column)}
    return keys if loss == "sft_loss" else {"data.prompt_key": str(column), "data.apply_chat_template": template}


def minibatches(groups: Any, samples: Any, size: Any) -> Keys:
    if groups is None or size is None:
        return {}
    count, remainder = divmod(groups * samples, size)
    if remainder or not count or groups % count:
        raise Hand(f"is no whole part of {groups} groups of {samples}: set algo.minibatches, which divides batch_size")
    return {"algo.minibatches": count}


def concurrency(samples: Any, size: Any) -> Keys:
    return {"rollout.max_groups": max(1, samples // size)}


def kl_reward(coef: Any) -> Keys:
    return {"algo.kl_coef": coef, "algo.kl_in": "reward"} if coef else {}


def eval_sets(data: Any, *values: Any) -> Keys:
    names = ("num_samples", "max_new_tokens", "temperature", "top_p", "top_k", "prompt_key", "label_key")
    as_in_generation = zip(names[2:5], values[7:], strict=True)
    pairs = [*as_in_generation, *zip(names, values[:7], strict=True)]
    keys = {key: value for key, value in pairs if value is not None and not has_gap(value)}
    parts = [str(part) for part in as_list(data)]
    if len(parts) % 2 or any("." in name for name in parts[::2]):
        raise Hand("is no list of names and files: write [eval.sets.NAME]")
    return {f"eval.sets.{name}": {"path": path, **keys} for name, path in zip(parts[::2], parts[1::2], strict=True)}


def warmup(updates: Any, share: Any, end: Any, steps: Any, *a_step: Any) -> Keys:
    """Counted in updates; a share is one of `end`, or else of all updates."""
    if updates is not None and updates >= 0:
        return {"optimizer.warmup_steps": updates}
    groups, samples, size, num = a_step
    num = num or (groups * samples / size if groups and size else 1)
    num_updates = end or (steps * num if steps else None)
    if share and num_updates is None:
        raise Hand("is a share of a number of steps that the file does not say: set optimizer.warmup_steps")
    return {"optimizer.warmup_steps": round(share * num_updates)} if share else {}


def warmup_of_steps(steps: Any, share: Any, total: Any, groups: Any, size: Any, passes: Any) -> Keys:
    """Counted in training steps, whatever the updates in one."""
    num = max(1, groups // size) * passes
    return warmup(None if steps is None else steps * num, share, None, total, None, None, None, num)


def least(rate: Any, low: Any) -> Keys:
    return {} if low is None else {"optimizer.min_lr_ratio": low / rate}


def betas(first: Any, second: Any) -> Keys:
    return {"optimizer.betas": [first, second]}


def tokens(per_gpu: Any, *sharing: Any) -> Keys:
    return {} if per_gpu is None else {"trainer.max_tokens_per_microbatch": per_gpu * math.prod(sharing)}


def placement(nodes: Any, gpus: Any, size: Any, rollout: Any, shares: Any, fraction: Any) -> Keys:
    """Ranks on all GPUs of the first nodes; engines on the same ones by turns, or on further GPUs."""
    num_rollout = rollout or gpus * nodes
    if not (1 <= nodes <= 4096 and 1 <= gpus <= 64 and size >= 1 and 1 <= num_rollout <= 32768):
        raise Hand("is no number of nodes and GPUs: set [roles.trainer] and [roles.rollout]")
    first, used, places = 0, min(8, num_rollout), [*range(nodes, nodes + math.ceil(num_rollout / min(8, num_rollout)))]
    keys: Keys = {}
    if flag(shares):
        first, used, places = 0, gpus, [*range(nodes)]
        keys = {"memory.share": "switch", "memory.workspace_mb": 12288, "sglang.mem_fraction_static": fraction}
        keys |= {"weights.channel": "disk", "roles.memory.nodes": places} if nodes > 1 else {}
    elif nodes == 1 and gpus + num_rollout <= 8:
        first, used, places = gpus, num_rollout, [0]
    if used % size:
        keys[""] = (
            f"engines of {size} GPUs do not fit {used} on a node: attach to such (engine.attach); here smaller ones"
        )
        size = used
    keys |= {"roles.trainer.nodes": [*range(nodes)], "roles.trainer.count": gpus, "roles.rollout.nodes": places}
    keys |= {"roles.rollout.count": used // size, "roles.trainer.devices": _span(0, gpus)}
    return keys | {"roles.rollout.devices": _span(first, used)}


def _span(first: int, num: int) -> str:
    return f"{first}-{first + num - 1}" if num > 1 else str(first)


def reward_file(path: Any, name: Any) -> Keys:
    return {} if path is None else {"reward.fn": f"{path}:{name}"}


OF_TEXTS = ("staleness", "columns", "eval_sets", "reward_file")


def convert(key: str, how: str, values: list[Any]) -> Keys:
    """By the name in the table: for `*` a function of this file. Raises Hand, and what arithmetic raises."""
    if key == "*":
        converted = [scalar(value) for value in values]
        if how not in OF_TEXTS and any(isinstance(value, (str, list, dict)) for value in converted):
            raise Hand("is no number")  # a text times a number would be a long one
        return globals()[how](*converted)
    if values[0] is None:
        return {}
    if how.startswith("map "):
        choices = dict(word.split("=") for word in how.split()[1:])
        if (name := str(scalar(values[0]))) not in choices:
            raise Hand(f"is none of {', '.join(choices)}")
        converted = scalar(choices[name] or "null")
    else:
        converted = SIMPLE[how](values[0])
    return {} if converted is None else {key: converted}
