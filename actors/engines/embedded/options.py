"""Settings of an embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.protocols import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Settings of an embedded engine."""

    max_running: int = 256
    """Sequences decoded together; fewer if memory demands it."""
    context_length: int = 0
    """Longest prompt plus answer in tokens; 0: the model's own."""
    dtype: str = "float32"
    """float32 agrees with the trainer to 1e-5 per log-prob; bfloat16 halves the memory and does not."""
    seed: int = 0
    """Of the requests that bring none."""
    version: int = 0
    """Weight version that the folder holds."""
    pause_mode: PauseMode = "in_place"
    """What a commit does to running requests: in_place keeps their cache, retract rebuilds it under the new weights,
    abort ends them."""
    stream_interval: int = 16
    """Deltas come every so many tokens, and at the end."""
    num_threads: int = 1
    """Of torch. More than one only pays on cores that nobody else uses: its barriers spin."""
    memory_share: float = 0.6
    """Part of the host's available memory to plan with; divide it by the number of engines on the host."""
    is_invariant: bool = False
    """Tokens and log-probs of a request depend on its tokens, its seed and the weights alone, to the bit: whatever
    shares its batch, and wherever it was continued. Slower: docs/benchmarks.md."""
    name: str = "embedded engine"
