"""Routing replay: in the training passes of a step experts are chosen as they were in its scoring pass.

Between the mini-batches of a step the weights change, and with them which experts a token goes to; its log-probs then
jump for a reason that no ratio corrects ("Group Sequence Policy Optimization", arXiv 2507.18071, section 5.3). Only the
choice is replayed; the chosen experts are weighed by the router of the moment, so it goes on learning.

Knows megatron.core's `RouterReplay`, one per layer of experts. Must not know samples. Acts in steps that have a scoring
pass (several mini-batches); with one, all tokens are trained under the weights that chose.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from . import mcore
from .batch import Pack

Mode = Literal["off", "record", "replay"]


class RoutingReplay:
    """The routers of a pipeline's chunks on this rank."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._routers: dict[int, list[Any]] = {
            id(chunk): [m.router_replay for m in chunk.modules() if getattr(m, "router_replay", None) is not None]
            for chunk in chunks
        }
        self._actions = mcore.module("transformer.moe.router_replay").RouterReplayAction
        self._mode: Mode = "off"
        self._choices: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def during(self, mode: Mode) -> Generator[None]:
        """Record or replay in the passes inside. What an earlier step recorded is forgotten when recording begins."""
        if mode == "record":
            self._choices.clear()
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "off"

    @contextmanager
    def of(self, chunk: nn.Module, pack: Pack) -> Generator[None]:
        """Around the forward pass of one pack through one chunk."""
        routers = self._routers[id(chunk)]
        key = (id(chunk), id(pack))
        known = self._choices.get(key)
        is_recorded = self._mode == "record"
        is_replayed = self._mode == "replay" and known is not None
        for number, router in enumerate(routers):
            if is_recorded:
                router.set_router_replay_action(self._actions.RECORD)
            elif is_replayed and known is not None:
                router.target_topk_idx = known[number]
                router.set_router_replay_action(self._actions.REPLAY_FORWARD)
        try:
            yield
        finally:
            if is_recorded:
                self._choices[key] = [router.get_recorded_indices() for router in routers]
            for router in routers:
                router.clear_router_replay_action()
                router.clear_indices()
