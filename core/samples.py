"""The data model: one complete record per stage; no bag of optional fields.

    Prompt -> Sample -> Group -> TrainSample -> TrainShard

Shapes: P = prompt tokens, R = response tokens (model turns and tool replies in order). Arrays are numpy,
little-endian, C-contiguous; on the wire they travel as raw frames beside the JSON body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .ids import OVERLONG

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FinishReason = Literal["stop", "length", "abort"]
LossPart = Literal["algo", "sft", "distill"]
"""What is learnt from a sample: by the loss of `[algo]`; its tokens, as in supervised fine-tuning; or to be nearer to
the reference model, whatever the reward is (`algo.kl_in = "advantage"`). Each part of the loss has its own
denominators."""

NO_VERSION = -1
"""Version stamp of tokens that no engine generated (tool replies, demonstrations)."""


REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thinking; the first is the one that templates read."""
DEMONSTRATION, DEMONSTRATION_TURNS = "demonstration", "demonstration_turns"
"""In the metadata of a prompt: its demonstration, as a text or as messages."""
MARGIN = "margin"
"""In the metadata of a pair: the least difference of scores that is asked for."""
PAIR = ("chosen", "rejected")
"""Columns of a pair of answers, and their places in the metadata; by the number of the sample in its group."""
LOSS_KEYS = ("train", "weight", "loss_mask", "step_loss_mask", "loss")
"""Names that data sets have for whether a message is learnt: 1 or true, 0 or false."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message, as chat templates know it."""

    role: str
    content: str
    """Its text; empty also where the row has none."""
    name: str = ""
    """Who speaks: of a tool's answer, the tool."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """What the assistant calls, as the template expects it: `{"type": "function", "function": {"name": ..., ...}}`."""
    tool_call_id: str = ""
    """Of a tool's answer: the call that it answers."""
    parts: tuple[dict[str, Any], ...] = ()
    """Content that the row has as a list of texts; `content` is all of them."""
    extra: dict[str, Any] = {}
    """What else the row says of it: `reasoning_content` and whatever the template looks at."""
    keys: tuple[str, ...] = ()
    """Keys that the row has in its order, where they are not those that have a value here. Empty: they are."""

    def as_template_sees(self) -> dict[str, Any]:
        """What there is, and no key for what there is not: templates ask whether a key is defined."""
        content = [dict(part) for part in self.parts] or self.content
        more = {"name": self.name, "tool_calls": [dict(c) for c in self.tool_calls], "tool_call_id": self.tool_call_id}
        if self.keys:
            values = {"role": self.role, "content": content, **more, **self.extra}
            return {key: values[key] for key in self.keys if key in values}
        filled = {key: value for key, value in more.items() if value}
        return {"role": self.role, "content": content, **filled, **self.extra}

    @property
    def is_learnt(self) -> bool:
        """Whether SFT learns it: a turn of the assistant's that the row does not switch off."""
        return self.role == "assistant" and all(self.extra.get(key, 1) == 1 for key in LOSS_KEYS)

    def with_text(self, text: str) -> Message:
        return msgspec.structs.replace(self, content=text, parts=(), keys=())


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One draw of one dataset row. `group_id` counts draws over the whole run and is the ledger's key."""

    group_id: int
    row: int
    """Row in the dataset file (0-based, after slicing)."""
    pass_index: int
    """How often the data had been gone through when this row was drawn."""
    draw: int = -1
    """Number of the draw: a prompt drawn again has a new group and its old draw. -1: it was not drawn (held-out)."""
    messages: tuple[Message, ...]
    """The conversation so far; a plain-text prompt is one user message."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the model may call, as the chat template expects them."""
    label: str = ""
    metadata: dict[str, Any] = {}
    source: str = ""
    """Dataset path the row came from."""
    source_name: str = ""
    """Its name among several sources; empty: there is only one."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finished generation: everything per *token*, exactly as the engine produced it. `len(response_ids) ==
    len(logprobs) == len(loss_mask) == len(versions) == R`. A rollout has one sample or several: they have the same
    `index`, one reward, and one weight in the loss."""

    group_id: int
    index: int
    """Number of the rollout inside the group, 0-based."""
    branch: int = 0
    """Number of the sample inside its rollout: 0 for the stream that the rollout began with."""
    prompt_ids: I32
    """int32 [P]."""
    response_ids: I32
    """int32 [R]: all turns in order, tool replies included."""
    logprobs: F32
    """float32 [R]: behaviour log-probs (nats) at the moment of sampling; 0 where `loss_mask` is 0."""
    loss_mask: U8
    """uint8 [R]: 1 where the model generated the token."""
    versions: I32
    """int32 [R]: weight version stamped by the engine, `NO_VERSION` where no engine generated the token."""
    kept: I32 | None = None
    """int32 [R * any]: for each token those that `top_p`, `top_k` and `min_p` left when it was drawn, filled up with
    -1; only -1: all. None: all, everywhere. `logprobs` and the trainer's softmax are over them
    (`rollout.replay_sampling`)."""
    experts: U8 | None = None
    """uint8 [any, bytes of a token]: the experts that the engine chose for each token, from the first of the prompt on
    (`ExpertChoices`); those behind have none yet. None: no engine told (`megatron.routing_replay`)."""
    finish: FinishReason
    num_turns: int = 1
    text: str = ""
    """Text of the last model turn, without special tokens."""
    turns: tuple[str, ...] = ()
    """Text of every model turn."""
    replies: tuple[tuple[Message, ...], ...] = ()
    """What was said to each model turn in order; the last turns may have none."""
    messages: tuple[Message, ...] = ()
    """The prompt of a conversation of its own, such as a sub-agent's; (): it begins with the group's prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    """That are offered in that conversation."""
    temperature: float = 1.0
    """Temperature that every token was drawn at: the trainer scores the sample with it. 0: greedy."""
    reference_logprobs: F32 | None = None
    """float32 [R]: log-probs (nats) under a reference model that is served elsewhere, at temperature 1; 0 where
    `loss_mask` is 0. None: no model was asked."""
    reward: float | None = None
    """What the workflow says that the rollout is worth; None: it says nothing."""
    token_rewards: F32 | None = None
    """float32 [R]: that part of the reward which was earned by a turn, at its last token. None: all at the end."""
    loss: LossPart = "algo"
    loss_weights: F32 | None = None
    """float32 [R]: factor of each token's loss; None: 1. It does not change the denominator."""
    metadata: dict[str, Any] = {}
    """Further values from the workflow for the reward function: JSON values."""

    def conversation(self) -> tuple[Message, ...]:
        """All that was said after the prompt, in order."""
        messages: list[Message] = []
        for number, text in enumerate(self.turns):
            messages.append(Message(role="assistant", content=text))
            messages += self.replies[number] if number < len(self.replies) else ()
        return tuple(messages)

    def oldest_version(self) -> int:
        """Oldest engine stamp of any token, or `NO_VERSION` when no engine took part."""
        stamped = self.versions[self.versions >= 0]
        return int(stamped.min()) if stamped.size else NO_VERSION

    @property
    def num_tokens(self) -> int:
        return int(self.prompt_ids.shape[0] + self.response_ids.shape[0])

    @property
    def kept_rows(self) -> I32 | None:
        """int32 [R, any]"""
        return None if self.kept is None else self.kept.reshape(max(len(self.response_ids), 1), -1)

    def model_runs(self) -> list[tuple[int, int]]:
        """Beginning and end, in the response, of each run of tokens that the model generated."""
        edges = np.flatnonzero(np.diff(self.loss_mask, prepend=np.uint8(0), append=np.uint8(0))).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def name(self) -> str:
        return sample_name(self.group_id, self.index, self.branch)


def joined_kept(parts: Sequence[tuple[I32 | None, int]]) -> I32 | None:
    """One behind the other, int32 [sum of n, any]: (kept [n, any], n) of each part."""
    width = max((kept.shape[1] for kept, _ in parts if kept is not None), default=0)
    if not width:
        return None
    joined = np.full((sum(count for _, count in parts), width), -1, np.int32)
    start = 0
    for kept, count in parts:
        if kept is not None:
            joined[start : start + count, : kept.shape[1]] = kept
        start += count
    return joined


def wrong_kept(kept: I32 | None, ids: I32, vocab_size: int) -> str:
    """Why that cannot be what the tokens `ids` were drawn from; empty if it can."""
    if kept is None:
        return ""
    if kept.ndim != 2 or len(kept) != len(ids):
        return f"kept has shape {kept.shape} for {len(ids)} tokens"
    if kept.size and (int(kept.min()) < -1 or int(kept.max()) >= vocab_size):
        return f"kept holds a token id outside [0, {vocab_size})"
    is_cut = (kept >= 0).any(axis=1)
    if not bool((kept == ids[:, None]).any(axis=1)[is_cut].all()):
        return "a token is not among those that it was drawn from"
    return ""


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """How the experts that a model's routers chose for tokens are kept: a row of bytes per token, with the ids of each
    layer that has experts in order, one byte each up to 256 experts, else two (little-endian)."""

    num_layers: int
    """Of the whole model."""
    layers: tuple[int, ...]
    """Those that have experts, from 0."""
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u1" if self.num_experts <= 256 else "<u2")

    @property
    def row_bytes(self) -> int:
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def packed(self, ids: npt.NDArray[Any]) -> U8:
        """Ids [n, layers with experts, top_k] -> uint8 [n, row_bytes]."""
        flat = np.ascontiguousarray(ids, self.dtype).reshape(-1)
        return flat.view(np.uint8).reshape(len(ids), self.row_bytes)

    def ids(self, experts: U8) -> npt.NDArray[Any]:
        """The way back: [n, layers with experts, top_k]."""
        shape = (len(experts), len(self.layers), self.top_k)
        return np.ascontiguousarray(experts).reshape(-1).view(self.dtype).reshape(shape)

    def wrong_ids(self, ids: npt.NDArray[Any]) -> str:
        """Why a router cannot have chosen these [n, layers with experts, top_k]; empty if it can."""
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.num_experts):
            return f"an expert outside [0, {self.num_experts})"
        columns = np.ascontiguousarray(ids.reshape(-1, self.top_k).T, self.dtype)  # a tenth of the time of sorting
        is_twice = np.zeros(columns.shape[1], np.bool_)
        for column, other in combinations(columns, 2):
            is_twice |= column == other
        if is_twice.any():
            token, layer = divmod(int(is_twice.argmax()), len(self.layers))
            return f"one expert twice for token {token} in layer {self.layers[layer]}: nothing was recorded there"
        return ""

    def wrong_sample(self, sample: Sample) -> str:
        """Why a pass over the sample cannot replay its experts; empty if it can, or if no engine took part in it."""
        if sample.oldest_version() == NO_VERSION or not sample.loss_mask.any():
            return ""
        needed = len(sample.prompt_ids) + int(np.flatnonzero(sample.loss_mask)[-1])
        experts = sample.experts
        if experts is None or len(experts) < needed:
            return f"the engine told the experts of {0 if experts is None else len(experts)} of {needed} tokens"
        if experts.ndim != 2 or experts.shape[1] != self.row_bytes:
            return f"experts have shape {list(experts.shape)}, the model's are {self.row_bytes} bytes of a token"
        return self.wrong_ids(self.ids(experts))


def joined_experts(parts: Sequence[U8 | None]) -> U8 | None:
    """uint8 [sum, bytes of a token]: those of tokens behind one another."""
    filled = [part for part in parts if part is not None and len(part)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0] if filled else None


def sample_name(group_id: int, index: int, branch: int) -> str:
    """For texts."""
    return f"{group_id}/{index}.{branch}" if branch else f"{group_id}/{index}"


def check_sample(sample: Sample, vocab_size: int | None = None) -> None:
    """Raise ValueError naming the field if the per-token arrays disagree or hold impossible values."""
    length = sample.response_ids.shape[0]
    for name in ("logprobs", "loss_mask", "versions"):
        got = getattr(sample, name).shape
        if got != (length,):
            raise ValueError(f"sample {sample.name}: {name} has shape {got}, response has {length} tokens")
    if length and not bool(np.isfinite(sample.logprobs).all()):
        raise ValueError(f"sample {sample.name}: a behaviour log-prob is NaN or infinite")
    if length and float(sample.logprobs.max()) > 1e-3:
        raise ValueError(f"sample {sample.name}: a behaviour log-prob is above 0")
    for name in ("token_rewards", "loss_weights", "reference_logprobs"):
        _check_optional(sample, name, getattr(sample, name))
    largest = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    if sample.kept is not None and len(sample.kept) % max(length, 1):
        raise ValueError(f"sample {sample.name}: kept has {len(sample.kept)} entries, response has {length} tokens")
    if wrong := wrong_kept(sample.kept_rows, sample.response_ids, largest):
        raise ValueError(f"sample {sample.name}: {wrong}")
    if vocab_size is not None:
        ids = np.concatenate([sample.prompt_ids, sample.response_ids])
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise ValueError(f"sample {sample.name}: a token id lies outside [0, {vocab_size})")


def _check_optional(sample: Sample, name: str, values: F32 | None) -> None:
    length = sample.response_ids.shape[0]
    if values is None:
        return
    if values.shape != (length,):
        raise ValueError(f"sample {sample.name}: {name} has shape {values.shape}, response has {length} tokens")
    is_finite = bool(np.isfinite(values).all())
    if name == "reference_logprobs" and length and not (is_finite and float(values.max()) <= 1e-3):
        raise ValueError(f"sample {sample.name}: a reference log-prob is NaN, infinite or above 0")
    if not is_finite or (name == "loss_weights" and bool((values < 0).any())):
        raise ValueError(f"sample {sample.name}: {name} holds a number that is NaN, infinite or, of a weight, below 0")


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rollouts of one prompt with their rewards: the unit that is kept, dropped, trained. Never split."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """Those of a rollout follow each other; the last one is what reward functions judged."""
    rewards: F32
    """float32 [num samples]: that of its rollout."""
    reward_parts: tuple[dict[str, float], ...] = ()
    """Named components per sample, for metrics only."""
    knobs: int = 0
    """Epoch of the live knobs that the group was dispatched under."""
    num_masked: int = 0
    """Members missing for good by their environment: the group is so much smaller than asked for."""

    @property
    def group_id(self) -> int:
        """The draw this group answers."""
        return self.prompt.group_id

    def rollout_rewards(self) -> F32:
        """float32 [num rollouts]: each rollout counts once, whatever number of samples it has."""
        return self.rewards[self._judged]

    def task_rewards(self) -> F32:
        """The same without the cost of length, which says nothing of whether an answer is right."""
        costs = np.array([parts.get(OVERLONG, 0.0) for parts in self.reward_parts] or np.zeros(len(self.samples)))
        rewards = np.where(costs, np.round(self.rewards - costs, 6), self.rewards)
        return rewards.astype(np.float32)[self._judged]

    @property
    def _judged(self) -> list[int]:
        """Which samples: the last of each rollout."""
        return list({sample.index: position for position, sample in enumerate(self.samples)}.values())

    def oldest_version(self) -> int:
        """Oldest engine stamp of any token of any member, or `NO_VERSION`."""
        versions = np.concatenate([np.empty(0, np.int32), *(sample.versions for sample in self.samples)])
        stamped = versions[versions >= 0]
        return int(stamped.min()) if stamped.size else NO_VERSION


_TEXTS = ("text", "turns", "replies", "messages", "tools", "metadata")
_SCORED = tuple(name for name in Sample.__struct_fields__ if name not in _TEXTS)


class TrainSample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample as a trainer rank gets it, without texts. `reward` is what its advantage was made of. `loss_weights`
    hold its part of the rollout's tokens, with reduction "rollout". `token_rewards`: where the rank discounts what
    turns earned (ppo, reinforce_pp); `advantage` is the rest then. `reference_logprobs`: where the rank needs those of
    a model that is served elsewhere."""

    advantage: float
    """Sample-level advantage after group normalisation; token-level terms (KL, discounting) are added by the rank."""
    token_advantages: F32 | None = None
    """float32 [R]: of each token, where there are such; then `advantage` is the mean of those in the loss."""

    @classmethod
    def of(cls, sample: Sample, advantage: float, **fields: Any) -> TrainSample:
        """The sample with its advantage; `fields` take the place of its own."""
        values: dict[str, Any] = {name: getattr(sample, name) for name in _SCORED}
        values |= {"advantage": advantage, **fields}
        return cls(**values)


class TrainShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part of one step. Every rank gets the same number of micro-batches in each mini-batch."""

    step: int
    """Version trained from; the step produces version `step + 1`."""
    samples: tuple[TrainSample, ...]
    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[minibatch][micro-batch] -> indexes into `samples`; an empty micro-batch only pads the count."""
    minibatch_tokens: tuple[float, ...]
    """Global number of loss tokens (all ranks) of each mini-batch, in samples of loss "algo"."""
    minibatch_rollouts: tuple[float, ...]
    """Global number of rollouts with at least one loss token of each mini-batch."""
    minibatch_parts: tuple[dict[LossPart, tuple[float, float]], ...] = ()
    """The same two numbers of the parts of the loss beside "algo"; (): no mini-batch has any."""
    is_held_out: bool = False
    """Whether nothing is learnt from it: its loss and metrics are asked for."""
