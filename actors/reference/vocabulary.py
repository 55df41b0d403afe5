"""Whether a server's model reads the policy's tokens: a few of them, spread over the vocabulary, must be known there,
and mean the same text. Pure.

Sizes are not compared: models of one family pad one vocabulary to different sizes. A server without a tokenizer tells
no texts, and is taken at its word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.protocols import Tokenizer
from .wire import Wanted

NUM_PROBES = 48
MOST_THAT_DIFFER = 0.25
"""Share of probes; tokenizers of one vocabulary write a few tokens differently that are no whole characters, or
special."""
UNREADABLE = "\ufffd"
"""What a part of a character is decoded to."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Tokens of the policy, and their texts."""

    wanted: Wanted
    texts: tuple[str, ...]
    """Of all but the first."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Probes:
        """Spread evenly over its vocabulary."""
        ids = np.unique(np.linspace(0, tokenizer.vocab_size - 1, NUM_PROBES + 1).astype(np.int32))
        texts = tuple(tokenizer.decode([token], skip_special=False) for token in ids[1:].tolist())
        return cls(Wanted(ids, 0), texts)

    def foreign(self, told: Sequence[str | None]) -> str:
        """What shows that `told`, the server's texts of the same tokens, are of another vocabulary; empty: nothing."""
        known = [
            (token, own, other)
            for token, own, other in zip(self.wanted.ids[1:].tolist(), self.texts, told, strict=True)
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
