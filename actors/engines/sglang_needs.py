"""What a run asks of SGLang servers that not every one of them can do, by the way it was started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangNeeds:
    """What the run file says; the defaults are met by every server."""

    tokenizer: bool = False
    """Texts and end tokens are looked at by the server: `rollout.stop`, `rollout.min_new_tokens`."""
    seeds: bool = False
    """It draws by each request's own seed: `rollout.deterministic`."""
    min_p: bool = False
    """It cuts by `rollout.min_p`."""

    def check(self, facts: Mapping[str, Any], place: str) -> None:
        """`facts`: of `/server_info`. Raises ConfigError for a server that says that it cannot; one that says nothing
        about it (another version, another server) is believed until it refuses a request."""
        if self.tokenizer and facts.get("skip_tokenizer_init") is True:
            raise ConfigError(
                f"{place}: was started with --skip-tokenizer-init, and stop strings or min_new_tokens are asked for",
                remedy="start it without, or leave rollout.stop and rollout.min_new_tokens out",
            )
        if self.seeds and facts.get("enable_deterministic_inference") is False:
            raise ConfigError(
                f"{place}: was started without --enable-deterministic-inference, so requests' seeds mean nothing to it",
                remedy="start it with that, or set rollout.deterministic = false",
            )
        if self.min_p and ends_at_min_p(facts):
            raise ConfigError(
                f"{place}: was started with --enable-deterministic-inference, and min_p would end it at once",
                remedy="start it without, or set rollout.min_p = 0 and use top_p or top_k",
            )


def ends_at_min_p(facts: Mapping[str, Any]) -> bool:
    """SGLang's sampler cannot do both seeds and min-p; ours, which says so, can."""
    return facts.get("enable_deterministic_inference") is True and facts.get("min_p_with_seeds") is not True


NO_NEEDS = SglangNeeds()
