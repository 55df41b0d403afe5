"""What a server says of its shortcuts: prompt tokens that it had in its cache, tokens that a draft guessed right."""

from __future__ import annotations

import msgspec


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over finished requests since the engine's client began; 0 where the server does not tell."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of those that were drafted."""
    verified_steps: int = 0
    """Forward passes that judged a draft."""
    verified_tokens: int = 0
    """New tokens of the requests that had such passes."""

    def __add__(self, other: EngineUsage) -> EngineUsage:
        return EngineUsage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def rates_since(self, before: EngineUsage) -> dict[str, float]:
        """Metrics of what came since `before`; nothing of what the server does not do, or does not tell."""
        new = {name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__}
        if min(new.values()) < 0:  # a server of several left, with its sums
            return {}
        rates = (
            ("prefix_cache_hit_rate", "cached_tokens", "prompt_tokens"),
            ("draft_acceptance_rate", "accepted_tokens", "drafted_tokens"),
            ("draft_accepted_length", "verified_tokens", "verified_steps"),
        )
        return {f"rollout/{name}": new[part] / new[whole] for name, part, whole in rates if new[whole]}
