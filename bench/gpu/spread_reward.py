"""A reward without a meaning but with a spread: for runs that measure speed with random weights."""

from __future__ import annotations

import zlib

from myxa.core.completions import Completion


async def spread(completion: Completion) -> float:
    """A number in [0, 1) that depends on the whole answer. In the loop: it takes a microsecond."""
    return zlib.crc32(completion.text.encode()) / 2**32
