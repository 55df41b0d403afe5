"""What a request's sampling must say to mean on an SGLang server what it means here. Knows the server's facts.

Of SGLang 0.5.17; the first was seen on a server, the others are so by its source and its sampler:

* before `min_new_tokens`, it keeps the tokenizer's own end token and `stop_token_ids` away, and ends nevertheless at
  every other end token of the model's configs (most models have two);
* when it draws by seeds, all requests without one have the same: the samples of a group would be equal;
* when it draws by seeds, a request with `min_p` fails an assertion in its sampler, which ends it with all its requests;
* when it draws by seeds, one request with `top_k` or `top_p` in a batch makes it sort the whole batch before it draws,
  and every row gets another token for the same seed. The server's own health check is such a request. So each request
  names a `top_k`, the vocabulary's size where it wants all: then all batches are sorted.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...core.errors import RequestRefused
from ...core.protocols import GenerateRequest
from .sglang_needs import ends_at_min_p

ALL = -1
"""`top_k` of a request that leaves no token out."""
SEED_BITS = 63
"""Servers keep seeds as signed 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class ServerSampling:
    """How one server draws."""

    end_token_ids: tuple[int, ...] = ()
    """By the model's configs."""
    is_seeded: bool = False
    """It draws by each request's seed."""
    ends_at_min_p: bool = False
    vocab_size: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, Any], end_token_ids: Collection[int], vocab_size: int) -> ServerSampling:
        """By its `/server_info`. End tokens outside the vocabulary are never drawn, and would end it."""
        ends = tuple(token for token in end_token_ids if 0 <= token < vocab_size)
        return cls(ends, facts.get("enable_deterministic_inference") is True, ends_at_min_p(facts), vocab_size)

    def meant(self, request: GenerateRequest, place: str) -> GenerateRequest:
        """The request as the server must be told it. Raises RequestRefused for one that would end the server."""
        sampling = request.sampling
        if sampling.min_p and self.ends_at_min_p:
            raise RequestRefused(
                f"{place}: min_p is {sampling.min_p:g}, which ends a server that was started with "
                "--enable-deterministic-inference",
                remedy="use top_p or top_k, or start it without",
            )
        if sampling.min_new_tokens:
            ends = tuple(sorted({*sampling.stop_token_ids, *self.end_token_ids}))
            sampling = replace(sampling, stop_token_ids=ends)
        if self.is_seeded:
            seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
            sampling = replace(sampling, seed=seed, top_k=self.vocab_size if sampling.top_k == ALL else sampling.top_k)
        return request if sampling is request.sampling else replace(request, sampling=sampling)
