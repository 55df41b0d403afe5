"""Cutting into buckets: nothing lost, nothing misaligned, fused partners together, the same every time."""

from __future__ import annotations

import random

import pytest
import torch
from tests.weights.model_tensors import shape

from myxa.actors.engines.sglang.weight_routes import bucket_bodies
from myxa.actors.weights.channels.plan import make_plan
from myxa.actors.weights.channels.sender import Fp8Rule
from myxa.actors.weights.channels.staging import TRAVEL, Staging, place
from myxa.core.errors import TrainError
from myxa.core.messages import TensorSpec


def layer(number: int) -> list[TensorSpec]:
    attention = f"model.layers.{number}.self_attn."
    mlp = f"model.layers.{number}.mlp."
    return [
        shape(attention + "q_proj.weight", "float8_e4m3fn", (8, 5)),
        shape(attention + "q_proj.weight_scale_inv", "float32", (1, 1)),
        shape(attention + "k_proj.weight", "bfloat16", (4, 3)),
        shape(attention + "k_proj.bias", "bfloat16", (3,)),
        shape(mlp + "gate_proj.weight", "bfloat16", (6, 4)),
        shape(mlp + "up_proj.weight", "bfloat16", (6, 4)),
    ]


TENSORS = [shape("model.embed_tokens.weight", "bfloat16", (16, 4)), *layer(0), *layer(1), *layer(10)]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 150, 300, 1 << 20])
def test_every_tensor_has_a_place_of_its_own_and_the_right_alignment(bucket_bytes: int):
    plan = make_plan(TENSORS, bucket_bytes)
    placed = [spec for bucket in plan.buckets for spec in bucket.tensors]
    assert sorted(s.name for s in placed) == sorted(t.name for t in TENSORS)
    for bucket in plan.buckets:
        end = 0
        for spec in bucket.tensors:
            assert spec.offset == end and spec.offset % getattr(torch, spec.dtype).itemsize == 0
            end += spec.num_bytes
        assert end == bucket.num_bytes
    assert plan.num_bytes == sum(t.num_bytes for t in TENSORS)


@pytest.mark.parametrize("bucket_bytes", [1, 60, 150])
def test_partners_that_engines_fuse_share_a_bucket(bucket_bytes: int):
    plan = make_plan(TENSORS, bucket_bytes)
    where = {spec.name: n for n, bucket in enumerate(plan.buckets) for spec in bucket.tensors}
    for number in (0, 1, 10):
        attention = f"model.layers.{number}.self_attn."
        assert len({where[n] for n in where if n.startswith(attention)}) == 1
    assert where["model.layers.1.mlp.up_proj.weight"] != where["model.layers.10.mlp.up_proj.weight"]


def test_buckets_are_filled_up_to_the_limit_and_not_beyond():
    tensors = [shape(f"model.layers.{n}.mlp.down_proj.weight", "float32", (10,)) for n in range(10)]
    assert [b.num_bytes for b in make_plan(tensors, 120).buckets] == [120, 120, 120, 40]
    assert [b.num_bytes for b in make_plan(tensors, 1).buckets] == [40] * 10, "a block larger than a bucket goes alone"


def test_random_models_are_cut_without_loss():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(50):
        tensors = [
            shape(
                f"m.{chance.randrange(4)}.{chance.randrange(3)}.w{n}",
                chance.choice(TRAVEL),
                tuple(chance.randrange(1, 6) for _ in range(chance.randrange(4))),
            )
            for n in range(chance.randrange(1, 40))
        ]
        plan = make_plan(tensors, chance.randrange(1, 500))
        specs = [s for b in plan.buckets for s in b.tensors]
        assert len(specs) == len(tensors) and all(s.offset % getattr(torch, s.dtype).itemsize == 0 for s in specs)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([shape("a.b.c", "float32", (1,)), shape("a.b.c", "float32", (1,))], "come twice: a.b.c"),
        ([shape("a.b.c", "float32", (0, 4))], "a.b.c is empty"),
    ],
)
def test_what_cannot_travel_is_named(tensors: list[TensorSpec], said: str):
    with pytest.raises(TrainError, match=said):
        make_plan(tensors, 100)
    with pytest.raises(TrainError, match="weight w has dtype complex64, which no engine takes"):
        Staging(100).publish(1, lambda: iter([("w", torch.zeros(4, dtype=torch.complex64))]))


def test_servers_hear_of_a_bucket_in_the_order_of_its_bytes():
    buckets = make_plan(TENSORS, 150).buckets
    bodies = bucket_bodies(buckets)
    assert bodies[0] == {
        "names": ["model.embed_tokens.weight"], "dtypes": ["bfloat16"], "shapes": [[16, 4]],
        "load_format": "flattened_bucket", "flush_cache": False,
    }  # fmt: skip
    assert [body["names"] for body in bodies] == [[t.name for t in bucket.tensors] for bucket in buckets]


def moe_layer(number: int, num_experts: int) -> list[TensorSpec]:
    attention, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
    return [
        shape(f"model.layers.{number}.input_layernorm.weight", "bfloat16", (4,)),
        shape(attention + "v_proj.weight", "bfloat16", (2, 4)),
        shape(attention + "q_proj.weight", "bfloat16", (6, 4)),
        shape(attention + "q_proj.bias", "bfloat16", (6,)),
        shape(attention + "k_proj.weight", "bfloat16", (2, 4)),
        shape(attention + "k_proj.bias", "bfloat16", (2,)),
        shape(attention + "v_proj.bias", "bfloat16", (2,)),
        shape(attention + "q_norm.weight", "bfloat16", (3,)),
        shape(mlp + "gate.weight", "float32", (num_experts, 4)),
        *(
            shape(f"{mlp}experts.{expert}.{kind}_proj.weight", "bfloat16", (4, 3) if kind == "down" else (3, 4))
            for kinds in (("up", "gate"), ("down",))
            for expert in reversed(range(num_experts))
            for kind in kinds
        ),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_parameters_of_an_engine_are_views_of_the_buckets(bucket_bytes: int):
    tensors = [shape("model.embed_tokens.weight", "bfloat16", (16, 4)), *moe_layer(0, 12), *moe_layer(1, 12)]
    values = {t.name: torch.randn(t.shape).to(getattr(torch, t.dtype)) for t in tensors}
    staging = Staging(bucket_bytes, joins=True)
    staged = staging.publish(1, lambda: iter(values.items()))
    assert staged is not None
    found = {
        spec.name: place(staged.buffers.bucket(number), spec)
        for number, bucket in enumerate(staged.buffers.plan.buckets)
        for spec in bucket.parameters
    }
    assert len(found) == 1 + 2 * 7
    for number in range(2):
        layer = f"model.layers.{number}."

        def of(name: str, layer: str = layer) -> torch.Tensor:
            return values[layer + name]

        for what in ("weight", "bias"):
            joined = torch.cat([of(f"self_attn.{kind}_proj.{what}") for kind in "qkv"])
            assert torch.equal(found[f"{layer}self_attn.qkv_proj.{what}"], joined)
        pairs = [
            torch.cat([of(f"mlp.experts.{expert}.{kind}_proj.weight") for kind in ("gate", "up")])
            for expert in range(12)
        ]
        assert torch.equal(found[layer + "mlp.experts.w13_weight"], torch.stack(pairs))
        downs = torch.stack([of(f"mlp.experts.{expert}.down_proj.weight") for expert in range(12)])
        assert torch.equal(found[layer + "mlp.experts.w2_weight"], downs)
        assert torch.equal(found[layer + "mlp.gate.weight"], of("mlp.gate.weight"))
    torn = [tensors[2], tensors[0], *tensors[3:10]]
    with pytest.raises(TrainError, match=r"layers\.0\.self_attn\.qkv_proj\.weight do not come together"):
        make_plan(torn, 1, joins=True)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_weights_are_joined_with_their_scales(suffix: str):
    layer = "model.layers.0."
    rows = {"q": 256, "k": 128, "v": 128}
    shapes = {f"{layer}self_attn.{kind}_proj.weight": (size, 256) for kind, size in rows.items()} | {
        f"{layer}mlp.experts.{expert}.{kind}_proj.weight": (256, 128) if kind == "down" else (128, 256)
        for expert in range(3)
        for kind in ("gate", "up", "down")
    }
    values = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    rule = Fp8Rule(names=frozenset(shapes), block=(128, 128), suffix=suffix)
    staging = Staging(1 << 20, joins=True)
    staged = staging.publish(1, lambda: rule.apply(iter(values.items())), lambda: rule.batches(iter(values.items())))
    assert staged is not None
    (bucket,) = staged.buffers.plan.buckets
    found = {spec.name: place(staged.buffers.bucket(0), spec) for spec in bucket.parameters}
    one = dict(rule.apply(iter(values.items())))
    names = [f"self_attn.{kind}_proj.weight" for kind in "qkv"]
    experts = [[f"mlp.experts.{n}.{kind}_proj.weight" for kind in ("gate", "up")] for n in range(3)]
    for end in ("", suffix):
        joined = {
            f"self_attn.qkv_proj.weight{end}": torch.cat([one[layer + name + end].float() for name in names]),
            f"mlp.experts.w13_weight{end}": torch.stack(
                [torch.cat([one[layer + name + end].float() for name in pair]) for pair in experts]
            ),
            f"mlp.experts.w2_weight{end}": torch.stack(
                [one[f"{layer}mlp.experts.{n}.down_proj.weight{end}"].float() for n in range(3)]
            ),
        }
        for name, wanted in joined.items():
            assert torch.equal(found[layer + name].float(), wanted), name
    assert len(found) == 6
