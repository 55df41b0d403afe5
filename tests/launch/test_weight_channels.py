"""Which way weights take, by what the run file says of devices and nodes; and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from myxa.core.config import RunConfig
from myxa.launch.composition.weight_channels import (
    COMMIT_S,
    adoption_limits,
    choose_channel,
    has_reader,
    ranks_read,
    seen_by_servers,
)


def config(
    channel: str = "auto", rollout: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **weights: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "weights": {"channel": channel, **weights},
            "roles": {
                "rollout": rollout or {},
                "trainer": {k: v for k, v in (trainer or {}).items() if k not in ("sglang", "attach")},
            },
            "engine": {"attach": (trainer or {}).get("attach", [])},
            "sglang": (trainer or {}).get("sglang", {}),
        }
    )


SERVER = {"kind": "sglang"}
TWO, TWO_RANKS = SERVER | {"devices": "0-1"}, {"devices": "0-1", "count": 2}


@pytest.mark.parametrize(
    ("rollout", "trainer", "wanted"),
    [
        ({}, {}, "shm"),
        ({"nodes": [1]}, {}, "disk"),
        ({"nodes": "*"}, {}, "disk"),
        (SERVER, {}, "disk"),
        (SERVER | {"devices": "1"}, {}, "disk"),
        (SERVER, {"devices": "0"}, "disk"),
        (SERVER | {"devices": "1"}, {"devices": "0"}, "nccl"),
        (SERVER | {"devices": "0"}, {"devices": "0"}, "cuda_ipc"),
        (SERVER | {"devices": "0-3"}, {"devices": "2"}, "cuda_ipc"),
        (SERVER | {"devices": "0-1"}, {"devices": "0-3", "count": 4}, "cuda_ipc"),
        (SERVER | {"devices": "0-3"}, {"devices": "0-3", "count": 2}, "cuda_ipc"),
        (SERVER | {"devices": "0-3"}, {"devices": "2", "attach": ["http://h:1"]}, "disk"),
        (TWO, TWO_RANKS, "cuda_ipc"),
        (TWO, TWO_RANKS | {"sglang": {"dp_size": 2}}, "disk"),
        (TWO, TWO_RANKS | {"sglang": {"dp_size": 2, "enable_dp_attention": True}}, "cuda_ipc"),
        (SERVER | {"devices": "0-1"}, {"devices": "2", "sglang": {"dp_size": 2}}, "disk"),
        (SERVER | {"devices": "0-1"}, {"devices": "2", "sglang": {"dp_size": 2, "enable_dp_attention": True}}, "nccl"),
        (SERVER | {"devices": "0", "nodes": [0, 1]}, {"devices": "0", "nodes": [0, 1]}, "cuda_ipc"),
        (SERVER | {"devices": "0", "nodes": [1]}, {"devices": "0"}, "nccl"),
    ],
)
def test_auto_takes_the_shortest_way_there_is(rollout: dict[str, Any], trainer: dict[str, Any], wanted: str):
    assert choose_channel(config(rollout=rollout, trainer=trainer)) == wanted


def test_a_named_channel_is_taken_and_bounds_the_commit():
    chosen = config("nccl", SERVER, join_s=7.0, transfer_s=20.0)
    assert choose_channel(chosen) == "nccl"
    limits = adoption_limits(chosen)
    assert adoption_limits(config()).sent_commit_s == 0.0, "an embedded engine reads"
    assert limits.sent_commit_s == 57.0 and limits.prepare_s == 60.0
    assert adoption_limits(config("nccl", SERVER, join_s=300.0)).prepare_s == 310.0
    slow = [adoption_limits(config("disk", kind, transfer_s=200.0)).commit_s for kind in (SERVER, {})]
    assert slow == [200.0, COMMIT_S]
    assert adoption_limits(config("disk", SERVER)).commit_s == COMMIT_S
    assert (limits.commit_by("nccl"), limits.commit_by("disk")) == (57.0, 30.0), "as each version comes"


@pytest.mark.parametrize(
    ("channel", "rollout", "trainer", "said"),
    [
        ("nccl", {}, {}, 'others take "shm" or "disk"'),
        ("cuda_ipc", {}, {"devices": "0"}, 'others take "shm" or "disk"'),
        ("shm", SERVER, {}, 'it takes "nccl"'),
        ("shm", {"nodes": [1]}, {}, "same nodes"),
        ("cuda_ipc", SERVER, {}, "it names none"),
        ("cuda_ipc", SERVER, {"devices": "0-1", "count": 2}, "name the GPUs of the engines"),
        (
            "cuda_ipc",
            SERVER | {"devices": "0,1"},
            {"devices": "0,1", "attach": ["http://h:1"]},
            "GPU 1 has an engine but no trainer rank",
        ),
        ("cuda_ipc", SERVER | {"devices": "0", "nodes": [1]}, {"devices": "0"}, "on the same nodes"),
        ("cuda_ipc", TWO, TWO_RANKS | {"sglang": {"dp_size": 2}}, "each tensor-parallel rank of a server"),
        ("cuda_ipc", TWO, TWO_RANKS | {"sglang": {"pp_size": 2}}, "each tensor-parallel rank of a server"),
        (
            "nccl",
            SERVER | {"devices": "0-1"},
            {"devices": "2", "sglang": {"dp_size": 2}},
            "sglang.dp_size makes others",
        ),
        (
            "nccl",
            SERVER | {"devices": "0-1"},
            {"devices": "2", "sglang": {"pp_size": 2}},
            "sglang.pp_size makes others",
        ),
        ("nccl", SERVER | {"devices": "0-1"}, {"devices": "1"}, "two processes on GPU 1"),
    ],
)
def test_what_cannot_be_is_said(channel: str, rollout: dict[str, Any], trainer: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        config(channel, rollout, trainer)


def test_each_engine_is_handed_memory_of_the_rank_on_its_own_gpu():
    trainer = {"devices": "2-5", "count": 4, "nodes": [1, 3]}
    run = config("cuda_ipc", SERVER | {"devices": "3-4", "nodes": [1, 3]}, trainer)
    assert ranks_read(run, 1, (3, 4)) == ("trainer/1", "trainer/2"), "one for each tensor-parallel rank"
    assert ranks_read(run, 3, (4,)) == ("trainer/6",), "ranks are numbered node by node"
    assert ranks_read(run, 1, (3, 6)) == ("trainer/1", "trainer/0"), "a GPU without a rank reads the first one's"
    assert ranks_read(run, 0, (3,)) == (), "no rank is on that node"
    assert seen_by_servers(run, {"CUDA_VISIBLE_DEVICES": "3"}, (3,)) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert seen_by_servers(run, {"CUDA_VISIBLE_DEVICES": "6", "A": "b"}, (6,)) == {
        "CUDA_VISIBLE_DEVICES": "6,2",
        "A": "b",
    }
    mixed = seen_by_servers(run, {"CUDA_VISIBLE_DEVICES": "2,6"}, (2, 6))
    assert mixed == {"CUDA_VISIBLE_DEVICES": "2,6"}, "a GPU named twice would hide all of them"
    assert [has_reader(run, local) for local in range(4)] == [False, True, True, False]
    alone = config("cuda_ipc", SERVER, {"devices": "0"})
    assert has_reader(alone, 0) and ranks_read(alone, 0, ()) == ()
    apart = config("cuda_ipc", SERVER | {"devices": "4-5"}, trainer | {"nodes": [0]})
    assert [has_reader(apart, local) for local in range(4)] == [False, False, True, True]
    apart = config("cuda_ipc", SERVER | {"devices": "6-7"}, trainer | {"nodes": [0]})
    assert [has_reader(apart, local) for local in range(4)] == [True, False, False, False]
    everywhere = config("cuda_ipc", SERVER | {"devices": "0", "nodes": "*"}, {"devices": "0", "nodes": "*"})
    assert ranks_read(everywhere, 2, (0,)) == ("trainer/2",)
