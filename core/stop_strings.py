"""Where a stop string ends an answer: with the first token that completes one. Pure.

An answer is token ids; text is only looked at. Tokens up to and including the one that completes a stop string stay, be
the string's end inside of it or not, so that what is trained on is what was drawn. Special tokens are part of the text.
The beginning of a string may lie in tokens that were there before: an answer that goes on elsewhere is cut where it
would have been cut in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for half a character, so no stop string may have it."""
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
SPARE_TOKENS = 8
"""Looked at beside those that a string's bytes may fill: tokens that decode to nothing, halves of characters."""


def wrong_stop_string(text: str) -> str:
    """Why this cannot be one, or nothing."""
    if not text:
        return "is empty: it would end an answer at once"
    if REPLACEMENT in text:
        return f"has {REPLACEMENT!r}, which stands for half a character"
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
        self.window = max((len(one.encode()) for one in self._strings), default=0) + SPARE_TOKENS
        """Tokens back from the newest in which a string that it completes begins."""

    def __bool__(self) -> bool:
        return bool(self._strings)

    def match(self, ids: Sequence[int], num_seen: int = 0) -> StopMatch | None:
        """The first stop string that a token of `ids[num_seen:]` completes; none ended in the tokens before."""
        first = max(num_seen - self.window, 0)
        if not self._strings or not self._found(ids, first, len(ids)):
            return None
        low, high = num_seen, len(ids)
        while high - low > 1:  # a text that holds it holds it with more tokens too
            middle = (low + high) // 2
            low, high = (low, middle) if self._found(ids, first, middle) else (middle, high)
        return StopMatch(high, self._found(ids, first, high))

    def _found(self, ids: Sequence[int], first: int, end: int) -> str:
        text = self._decode(ids[first:end])
        return next((one for one in self._strings if one in text), "")
