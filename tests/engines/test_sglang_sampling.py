"""What an SGLang server must be told so that sampling means there what it means here."""

from __future__ import annotations

import pytest

from myxa.actors.engines.sglang.engine import ServerSampling
from myxa.actors.engines.sglang.server_args import SglangNeeds
from myxa.core.errors import ConfigError, RequestRefused

SEEDED = {"enable_deterministic_inference": True}
OURS = SEEDED | {"min_p_with_seeds": True}


def test_end_tokens_of_the_models_configs_are_kept_away_too(ask):
    server = ServerSampling.of({}, (257, 319, 320), 320)
    long_enough = ask("r", min_new_tokens=3, stop_token_ids=(5, 257))
    assert server.meant(long_enough, "here").sampling.stop_token_ids == (5, 257, 319)
    free = ask("r", stop_token_ids=(5,))
    assert server.meant(free, "here") is free


def test_requests_without_a_seed_have_each_their_own_where_seeds_count(ask):
    server = ServerSampling.of(SEEDED, (), 320)
    seeds = [server.meant(ask("r"), "here").sampling.seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert server.meant(ask("r", seed=0), "here").sampling.seed == 0
    assert (
        ServerSampling.of({"enable_deterministic_inference": False}, (), 320).meant(ask("r"), "here").sampling.seed
        is None
    )


def test_min_p_never_reaches_a_server_that_it_would_end(ask):
    with pytest.raises(RequestRefused, match=r"here: min_p is 0\.1, which ends a server that was started with"):
        ServerSampling.of(SEEDED, (), 320).meant(ask("r", min_p=0.1), "here")
    with pytest.raises(ConfigError, match="http://h:1: was started with --enable-deterministic-inference, and min_p"):
        SglangNeeds(min_p=True).check(SEEDED, "http://h:1")
    for facts in (OURS, {}, {"enable_deterministic_inference": False}):
        SglangNeeds(min_p=True).check(facts, "http://h:1")
        assert ServerSampling.of(facts, (), 320).meant(ask("r", min_p=0.1), "here").sampling.min_p == 0.1


def test_who_shares_the_batch_of_a_seeded_server_changes_no_draw(ask):
    """SGLang sorts a batch before it draws if any of its requests has a top_k, its own health check too."""
    server = ServerSampling.of(SEEDED, (), 320)
    assert server.meant(ask("r", seed=1), "here").sampling.top_k == 320
    assert server.meant(ask("r", seed=1, top_k=5), "here").sampling.top_k == 5
    for other in ({}, OURS):
        assert ServerSampling.of(other, (), 320).meant(ask("r"), "here").sampling.top_k == -1
