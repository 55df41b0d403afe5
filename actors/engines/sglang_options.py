"""Settings of the client of an SGLang server."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.protocols import PauseMode
from .sglang_needs import NO_NEEDS, SglangNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Settings of the client."""

    vocab_size: int
    """Of the model folder; SGLang does not tell."""
    model_type: str = ""
    """Of the model folder; a server of another one is refused. Empty: any."""
    context_length: int = 0
    """Longest prompt plus answer; 0: what the server says, if it does."""
    model_context_length: int = 0
    """What the model allows; meant when neither is told."""
    max_running: int = 256
    """Requests worth sending at once, if the server does not say."""
    pause_mode: PauseMode = "in_place"
    """How running requests meet a commit."""
    start_s: float = 600.0
    """How long `start` waits for a server that is still loading."""
    call_s: float = 120.0
    """Deadline of control calls; a weight update reads a whole model."""
    stall_s: float = 600.0
    """Longest silence of a stream, pauses included."""
    health_every_s: float = 5.0
    """How often `until_lost` looks at the server."""
    lost_after_s: float = 60.0
    """Silence of `/health` after which the server counts as lost; while it loads weights it may be silent."""
    admin_key: str = ""
    """Bearer of all calls; empty: the server asks for none."""
    generate_url: str = ""
    """Where requests are sent, if not to the server itself: a router in front of it."""
    end_token_ids: tuple[int, ...] = ()
    """All that end an answer by the model's configs; SGLang itself keeps only the tokenizer's away before a least
    length."""
    needs: SglangNeeds = NO_NEEDS
    profile_dir: str = ""
    """Where the server, on this file system, writes its profiles; empty: where it does by itself."""
    name: str = "sglang"
