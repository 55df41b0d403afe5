"""What a server's senders are going to send: their plans, asked for with every version, transferred once; and the look
at what has arrived.

Knows SGLang's questions and the `WeightSenders` protocol; must not know how bytes travel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ...core.errors import CallError, RequestRefused
from ...core.protocols import WeightSenders
from ...core.weight_channel import Bucket, PlanReply, PlanRequest, SampleRequest
from .sglang_wire import version_number
from .weight_bodies import BucketBody, bucket_bodies, check_sample, sampled_names
from .weight_route import ServerControl

NUM_SAMPLED = 4
"""Tensors looked at by one verification, and values of each."""
SAMPLED_VALUES = 64
_log = logging.getLogger("myxa.weights")


@dataclass(slots=True)
class KnownPlan:
    """What is known of one sender's plan."""

    fingerprint: str
    digests: tuple[str, ...]
    """Of the buckets of the version asked about last."""
    buckets: tuple[Bucket, ...]
    bodies: tuple[BucketBody, ...]


class SenderPlans:
    """See the module's head."""

    def __init__(self, server: ServerControl, senders: WeightSenders, *, verify_every: int) -> None:
        """`verify_every`: after so many versions some of the server's weights are read back; 0: never."""
        self._server = server
        self._senders = senders
        self._verify_every = verify_every
        self._known: dict[str, KnownPlan] = {}
        self._num_ranks = 0
        self._loaded = -1
        """The version that was loaded last, by us and whole."""
        self._num_loaded = 0
        self._can_be_read = True

    def of(self, sender: str) -> KnownPlan:
        """What it was asked for last."""
        return self._known[sender]

    async def ask(self, sender: str, version: int, channel: str = "") -> PlanReply:
        """The sender's plan is known afterwards."""
        known = self._known.get(sender)
        reply = await self._senders.plan(
            sender, PlanRequest(version=version, known=known.fingerprint if known else "", channel=channel)
        )
        if known is None or known.fingerprint != reply.fingerprint:
            known = self._known[sender] = KnownPlan(reply.fingerprint, (), reply.buckets, bucket_bodies(reply.buckets))
        known.digests = tuple(reply.digest.split("."))
        return reply

    async def num_ranks(self) -> int:
        """Processes of the server that take part: its tensor-parallel ranks."""
        if not self._num_ranks:
            facts = await self._server.get("/server_info")
            found = facts.get("tp_size", 1)
            self._num_ranks = found if isinstance(found, int) and found > 0 else 1
        return self._num_ranks

    async def is_same_server(self) -> bool:
        """Whether the server still is the incarnation that we loaded: a new one does not announce our version."""
        served = version_number((await self._server.get("/model_info")).get("weight_version"))
        return self._loaded >= 0 and served == self._loaded

    def loaded(self, version: int) -> None:
        """The server serves that version, by us."""
        self._loaded = version
        self._num_loaded += 1

    async def verify(self, senders: Iterable[str]) -> None:
        """Read some of the loaded version back, while tokens flow. Raises EngineError when it is not what was sent.

        SGLang 0.5.17 can read weights back for models of the Llama class alone; from a server that cannot, nothing more
        is asked.
        """
        every = self._verify_every
        if not every or self._loaded < 0 or self._num_loaded % every or not self._can_be_read:
            return
        for sender in senders:
            known = self._known.get(sender)
            names = sampled_names(known.buckets, self._loaded, NUM_SAMPLED) if known else ()
            request = SampleRequest(version=self._loaded, names=names, num_values=SAMPLED_VALUES)
            try:
                sent = (await self._senders.sample(sender, request)).values
                for name, values in zip(names, sent, strict=True):
                    body = {"name": name, "truncate_size": len(values)}
                    served = await self._server.ask("/get_weights_by_name", body)
                    check_sample(f"{self._server.place}: version {self._loaded}", name, values, served)
            except RequestRefused as err:
                _log.warning("weights.verify_every: %s cannot tell its weights: %s", self._server.place, err.message)
                self._can_be_read = False
                return
            except CallError as err:  # released meanwhile; the next version is looked at instead
                _log.info("version %d was not verified: %s", self._loaded, err)
