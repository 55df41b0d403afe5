"""Answers of `POST /generate`: collects an engine's deltas and writes them in SGLang's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.protocols import Delta, GenerateRequest
from ...core.samples import F32, I32, FinishReason
from .sglang_wire import finish_reason, spans_of


class Reply:
    """One generation in the making."""

    def __init__(
        self,
        request: GenerateRequest,
        rid: str,
        *,
        decode: Callable[[Sequence[int]], str],
        now_s: float,
        wants_logprobs: bool,
        trims_stop: bool = True,
        is_incremental: bool = False,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        """`is_incremental`: each answer holds the tokens since the last one, else all so far. `text_of`: a token's,
        told with its log-prob."""
        self._rid = rid
        self._num_prompt = len(request.input_ids)
        self._decode = decode
        self._started_s = now_s
        self._wants_logprobs = wants_logprobs
        self._trims_stop = trims_stop
        self._is_incremental = is_incremental
        self._text_of = text_of
        self._given: list[list[Any]] = []
        """Log-prob, id and text of tokens of the prompt."""
        self._ids: I32 = np.zeros(0, dtype=np.int32)
        self._logprobs: F32 = np.zeros(0, dtype=np.float32)
        self._versions: I32 = np.zeros(0, dtype=np.int32)
        self._num_said = 0
        self._finish: FinishReason | None = None
        self._matched: int | str | None = None

    def add(self, delta: Delta) -> None:
        """More tokens."""
        self._ids = np.concatenate([self._ids, delta.output_ids])
        self._logprobs = np.concatenate([self._logprobs, delta.logprobs])
        self._versions = np.concatenate([self._versions, delta.versions])
        self._finish, self._matched = delta.finish, delta.matched_text or delta.matched

    def scored(self, ids: Sequence[int], logprobs: F32) -> None:
        """Tokens of the prompt, and the log-probs of all but the first of them."""
        self._given = self._told([None, *logprobs.tolist()][: len(ids)], ids)

    def _told(self, logprobs: Sequence[float | None], ids: Sequence[int]) -> list[list[Any]]:
        text_of = self._text_of
        return [[logprob, i, text_of and text_of(i)] for logprob, i in zip(logprobs, ids, strict=True)]

    @property
    def is_finished(self) -> bool:
        """Whether the last delta was added."""
        return self._finish is not None

    def answer(self, version: int, now_s: float) -> dict[str, Any]:
        """The object to send; `version` is what the engine serves, for answers without a token."""
        first = self._num_said if self._is_incremental else 0
        self._num_said = len(self._ids)
        ids: list[int] = self._ids[first:].tolist()
        spans = spans_of(self._versions)
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": finish_reason(self._finish, matched=self._matched, num_tokens=len(self._ids)),
            "prompt_tokens": self._num_prompt,
            "weight_version": spans[-1].version if spans else str(version),
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in spans],
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(self._ids),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if self._wants_logprobs:
            meta["input_token_logprobs"] = self._given
            meta["output_token_logprobs"] = self._told(self._logprobs[first:].tolist(), ids)
            meta["output_token_logprobs_length"] = len(self._ids)
        if self._finish is not None:
            meta["e2e_latency"] = now_s - self._started_s
        return {"text": self._text(ids), "output_ids": ids, "meta_info": meta}

    def _text(self, ids: list[int]) -> str:
        """Without the token or from the stop string on that ended it, unless asked not to. Where answers hold what is
        new only, the beginning of a stop string may have been said before."""
        if self._finish != "stop" or not self._trims_stop:
            return self._decode(ids)
        if not isinstance(self._matched, str):
            return self._decode(ids[:-1])
        before, found, _ = self._decode(ids).rpartition(self._matched)
        return before if found else ""
