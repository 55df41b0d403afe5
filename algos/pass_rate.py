"""pass@k: the chance that at least one of k answers to a prompt solves it, estimated without bias from n answers.

    1 - C(n - c, k) / C(n, k)    for c solved of n (Chen et al. 2021, arXiv:2107.03374)

The plain estimate 1 - (1 - c/n)^k is biased downwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb


def pass_at(k: int, num_solved: int, num_answers: int) -> float:
    """Of one prompt. Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= num_answers and 0 <= num_solved <= num_answers):
        raise ValueError(f"pass@{k} of {num_solved} solved of {num_answers} answers")
    return 1.0 - comb(num_answers - num_solved, k) / comb(num_answers, k)


def pass_rates(counts: Iterable[tuple[int, int]]) -> dict[int, float]:
    """K -> mean of pass@k over prompts, given (solved, answers) of each: for 1, 2, 4, ... up to the fewest answers that
    any prompt has. Empty without prompts."""
    told = list(counts)
    fewest = min((num_answers for _, num_answers in told), default=0)
    ks = [1 << power for power in range(fewest.bit_length()) if 1 << power <= fewest]
    return {k: sum(pass_at(k, solved, answers) for solved, answers in told) / len(told) for k in ks}
