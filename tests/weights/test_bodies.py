"""What servers are told about buckets, and how a look at their weights is judged."""

from __future__ import annotations

import pytest

from myxa.actors.engines.sglang.weight_routes import bucket_bodies, check_sample, sampled_names
from myxa.actors.weights.channels.plan import Shape, make_plan
from myxa.core.errors import EngineError

PLAN = make_plan(
    [
        Shape("model.embed_tokens.weight", "bfloat16", (8, 4)),
        *(Shape(f"model.layers.{n}.input_layernorm.weight", "bfloat16", (4,)) for n in range(5)),
        Shape("model.layers.0.self_attn.q_norm.weight", "bfloat16", (2,)),
        Shape("model.norm.weight", "bfloat16", (4,)),
    ],
    64,
)


def test_a_bucket_is_named_in_the_order_of_its_bytes():
    bodies = bucket_bodies(PLAN.buckets)
    assert len(bodies) == len(PLAN.buckets) > 1
    assert bodies[0] == {
        "names": ["model.embed_tokens.weight"], "dtypes": ["bfloat16"], "shapes": [[8, 4]],
        "load_format": "flattened_bucket", "flush_cache": False,
    }  # fmt: skip
    assert bodies[-1]["names"] == [t.name for t in PLAN.buckets[-1].tensors]


def test_every_norm_has_its_turn_and_nothing_that_servers_fuse():
    seen = {name for version in range(10) for name in sampled_names(PLAN.buckets, version, 2)}
    assert seen == {f"model.layers.{n}.input_layernorm.weight" for n in range(5)} | {"model.norm.weight"}
    assert sampled_names((), 3, 2) == ()


def test_a_sample_may_differ_by_the_grain_of_bfloat16_and_no_more():
    check_sample("here", "w", (1.0, -2.0, 0.0), [1.0, -2.01, 0.0])
    for served in ([1.0, -2.1, 0.0], [1.0, -2.0], [1.0, -2.0, 0.0, 0.0], None, {"parameter": 1}, [1.0, "x", 0.0]):
        with pytest.raises(EngineError, match="here: w begins with"):
            check_sample("here", "w", (1.0, -2.0, 0.0), served)
