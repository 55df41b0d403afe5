"""Which sampling values an engine can compute with, and where a stop string ends an answer. Pure.

A stop string ends an answer with the first token that completes it. Tokens up to and including that one stay, whether
or not the string ends inside of it, so that the trained tokens are the drawn ones. A string may begin in earlier
tokens: an answer that another engine continues is cut where it would have been cut in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from .messages import SamplingParams

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoded text has it for half a character, so no stop string may have it."""
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
SPARE_TOKENS = 8
"""Looked at beside those that a string's bytes may fill: tokens that decode to nothing, halves of characters."""


def wrong_stop_string(text: str) -> str:
    """Why this cannot be one, or nothing."""
    if not text:
        return "is empty: it would end an answer at once"
    if REPLACEMENT in text:
        return f"has {REPLACEMENT!r}, which is written for half a character"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "has half a surrogate pair, which no text has"
    if len(text.encode()) > MAX_STOP_BYTES:
        return f"is longer than {MAX_STOP_BYTES} bytes"
    return ""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in an answer."""

    end: int
    """Tokens of the answer up to and including the one that completes it."""
    text: str
    """The stop string."""


class StopStrings:
    """Some stop strings, and the decoder (special tokens kept) of the ids in which they are looked for."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self.window = max((len(string.encode()) for string in self._strings), default=0) + SPARE_TOKENS
        """Tokens back from the newest in which a string that it completes begins."""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def match(self, ids: Sequence[int], num_seen: int = 0) -> StopMatch | None:
        """The first stop string that a token of `ids[num_seen:]` completes; none ended in the tokens before."""
        first = max(num_seen - self.window, 0)
        if not self._strings or not self._first_in(ids, first, len(ids)):
            return None
        low, high = num_seen, len(ids)
        while high - low > 1:  # a text that holds it holds it with more tokens too
            middle = (low + high) // 2
            low, high = (low, middle) if self._first_in(ids, first, middle) else (middle, high)
        return StopMatch(high, self._first_in(ids, first, high))

    def _first_in(self, ids: Sequence[int], first: int, end: int) -> str:
        text = self._decode(ids[first:end])
        return next((string for string in self._strings if string in text), "")


MAX_PENALTY = 2.0
MIN_FACTOR = 1e-6
"""Least temperature above 0 and least repetition penalty: float32 still divides a logit by it."""
MAX_TEMPERATURE = 1e6
MAX_TOP_K = 2**31 - 1
"""As on servers: a signed 32-bit number."""
MAX_STOP_IDS = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**64
MAX_TOKENS = 2**31 - 1


class SamplingFault(NamedTuple):
    """A field with a wrong value."""

    field: str
    fault: str
    """What is wrong, said after the field's name."""
    remedy: str


def sampling_fault(sampling: SamplingParams) -> SamplingFault | None:
    """The first one; None: there is none."""
    return next(_type_faults(sampling), None) or next(_range_faults(sampling), None)


def _type_faults(sampling: SamplingParams) -> Iterator[SamplingFault]:
    """Python does not check the types of what user code passes."""
    try:
        msgspec.convert(msgspec.to_builtins(sampling), type(sampling))
    except (msgspec.ValidationError, TypeError) as error:
        message, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").partition("[")[0]
        fault = f"is {getattr(sampling, name)!r}"[:120] if name else message
        yield SamplingFault(name, fault, f"use plain values: {message.lower()}")


_RANGES: tuple[tuple[str, float, float, float | None, str], ...] = (
    ("max_new_tokens", 1, MAX_TOKENS, None, f"1 up to {MAX_TOKENS}"),
    ("temperature", MIN_FACTOR, MAX_TEMPERATURE, 0, f"0 (greedy), or {MIN_FACTOR:g} up to {MAX_TEMPERATURE:g}"),
    ("top_p", math.ulp(0.0), 1, None, "a number above 0 and at most 1"),
    ("top_k", 1, MAX_TOP_K, -1, f"-1 (no limit), or 1 up to {MAX_TOP_K}"),
    ("min_p", 0, 1, None, "0 (all tokens) up to 1"),
    ("repetition_penalty", MIN_FACTOR, MAX_PENALTY, None, f"{MIN_FACTOR:g} up to {MAX_PENALTY:g}; 1 = none"),
    ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, None, f"-{MAX_PENALTY:g} up to {MAX_PENALTY:g}; 0 = none"),
    ("presence_penalty", -MAX_PENALTY, MAX_PENALTY, None, f"-{MAX_PENALTY:g} up to {MAX_PENALTY:g}; 0 = none"),
)
"""Name, least, most, a value that is right beside them, and what to use. The bounds of penalties are SGLang's."""


def _range_faults(sampling: SamplingParams) -> Iterator[SamplingFault]:
    for name, least, most, beside, right in _RANGES:
        value: float = getattr(sampling, name)
        if value != beside and not least <= value <= most:
            yield SamplingFault(name, f"is {value}", f"use {right}")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        yield SamplingFault("min_new_tokens", f"is {sampling.min_new_tokens}", f"use 0 up to {sampling.max_new_tokens}")
    if sampling.seed is not None and not MIN_SEED <= sampling.seed <= MAX_SEED:
        yield SamplingFault("seed", f"has {sampling.seed.bit_length()} bits", "use a number of at most 64 bits")
    yield from _stop_faults(sampling)


def _stop_faults(sampling: SamplingParams) -> Iterator[SamplingFault]:
    remedy = f"at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_BYTES} bytes"
    if len(sampling.stop) > MAX_STOP_STRINGS:
        yield SamplingFault("stop", f"has {len(sampling.stop)} strings", remedy)
    for text in sampling.stop:
        if why := wrong_stop_string(text):
            yield SamplingFault("stop", f"has {text[:80]!r}, which {why}", remedy)
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        yield SamplingFault("stop_token_ids", f"has {len(sampling.stop_token_ids)}", f"use at most {MAX_STOP_IDS}")
