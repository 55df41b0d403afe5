"""What a server of the reference model is asked, and what it may answer: SGLang's /generate. Pure.

    {"input_ids": prompt + answer, "logprob_start_len": s, "return_logprob": true,
     "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    ->  {"meta_info": {"input_token_logprobs": [[null, id, text], [log-prob, id, text], ...]}, ...}

The list begins with token s, which has no log-prob; those of the others are at temperature 1 in any case.

`Probes` tests whether a server's model reads the policy's tokens: a few ids, spread over the vocabulary, must be known
there, and mean the same text. Sizes are not compared: models of one family pad one vocabulary to different sizes. A
server without a tokenizer returns no texts, and its ids are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...core.protocols import Tokenizer
from ...core.samples import F32, I32, Sample

HIGHEST = 1e-3
"""A log-prob, as numbers of limited precision have it."""


class BadAnswer(Exception):
    """What came back cannot be log-probs of what was sent; the text says why."""


@dataclass(frozen=True, slots=True)
class WantedScores:
    """Tokens to be scored."""

    ids: I32
    """int32 [T]: with all tokens before them."""
    start: int
    """The last token that is not to be scored."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Answer(msgspec.Struct):
    meta_info: _Meta


_answer = msgspec.json.Decoder(_Answer)


def wanted_of(sample: Sample) -> WantedScores | None:
    """From the first to the last token that the policy has drawn; None: there is none that has a token before it."""
    drawn = np.flatnonzero(sample.loss_mask)
    prompt_len = len(sample.prompt_ids)
    if not drawn.size or prompt_len + int(drawn[-1]) == 0:
        return None
    ids = np.concatenate([sample.prompt_ids, sample.response_ids[: int(drawn[-1]) + 1]])
    return WantedScores(ids.astype(np.int32, copy=False), max(prompt_len + int(drawn[0]) - 1, 0))


def in_response(sample: Sample, wanted: WantedScores, logprobs: F32) -> F32:
    """float32 [R]: each log-prob at its token's place, 0 where the policy drew none."""
    placed = np.zeros(len(sample.response_ids), dtype=np.float32)
    first = wanted.start + 1 - len(sample.prompt_ids)
    placed[first : first + len(logprobs)] = logprobs
    return np.where(sample.loss_mask != 0, placed, np.float32(0))


def question(wanted: WantedScores, *, with_texts: bool = False, is_checked: bool = False) -> bytes:
    """The body to send. `is_checked`: the server is to refuse ids that its model does not have. SGLang does not look at
    input ids, and an unknown one ends it; at ids that have a bias it looks first, and a bias of 0 changes nothing."""
    sampling: dict[str, Any] = {"max_new_tokens": 0, "temperature": 1.0}
    if is_checked:
        sampling["logit_bias"] = {str(int(wanted.ids.max())): 0.0}
    return msgspec.json.encode(
        {
            "input_ids": wanted.ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": wanted.start,
            "return_text_in_logprobs": with_texts,
            "stream": False,
        }
    )


def scores_in(raw: bytes, wanted: WantedScores) -> tuple[F32, list[str | None]]:
    """Log-prob and text of each wanted token, float32 [T - start - 1]. Raises BadAnswer."""
    try:
        found = _answer.decode(raw).meta_info.input_token_logprobs
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadAnswer(f"answered with no log-probs of the prompt: {error}") from error
    ids = wanted.ids[wanted.start :].tolist()
    if len(found) != len(ids):
        raise BadAnswer(f"answered with {len(found)} log-probs for {len(ids)} tokens")
    values: list[float] = []
    highest = max(ids)
    for at, (asked, (value, token, _)) in enumerate(zip(ids, found, strict=True)):
        if token != asked and not (token == 0 and asked == highest):  # SGLang writes 0 for the last of its vocabulary
            raise BadAnswer(f"answered of token id {token} at place {at}, where {asked} was sent")
        if at == 0:
            continue
        if value is None or not math.isfinite(value) or value > HIGHEST:
            raise BadAnswer(f"answered that the log-prob of token id {asked} at place {at} is {value}")
        values.append(value)
    return np.asarray(values, dtype=np.float32), [text for _, _, text in found[1:]]


NUM_PROBES = 48
MOST_THAT_DIFFER = 0.25
"""Share of probes; tokenizers of one vocabulary write a few special or partial tokens differently."""
UNREADABLE = "\ufffd"
"""What a part of a character is decoded to."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Tokens of the policy, and their texts."""

    wanted: WantedScores
    texts: tuple[str, ...]
    """Of all but the first."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Probes:
        """Spread evenly over its vocabulary."""
        ids = np.unique(np.linspace(0, tokenizer.vocab_size - 1, NUM_PROBES + 1).astype(np.int32))
        texts = tuple(tokenizer.decode([token], skip_special=False) for token in ids[1:].tolist())
        return cls(WantedScores(ids, 0), texts)

    def foreign(self, found: Sequence[str | None]) -> str:
        """What shows that `found`, the server's texts of the same tokens, are of another vocabulary; empty: nothing."""
        known = [
            (token, own, other)
            for token, own, other in zip(self.wanted.ids[1:].tolist(), self.texts, found, strict=True)
            if other is not None and UNREADABLE not in own + other
        ]
        differ = [one for one in known if one[1].strip() != one[2].strip()]
        if len(differ) <= MOST_THAT_DIFFER * len(known):
            return ""
        token, own, other = differ[0]
        return (
            f"{len(differ)} of {len(known)} tokens mean another text there, such as {token}: {other!r} instead of "
            f"{own!r}"
        )
