"""What an answer's length costs: the soft over-long punishment of DAPO (arXiv 2503.14476, equation 13).

L_max - L_buffer >= n              0
L_max - L_buffer < n <= L_max      (L_max - L_buffer - n) / L_buffer, from 0 down to -1
L_max < n                          -1
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Between -1 and 0, for an answer of `num_tokens` tokens where `max_tokens` are L_max. `buffer`, from 1 to
    `max_tokens`: over how many tokens before it the punishment grows."""
    return -min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)
