"""What an engine plans to take, and when it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from myxa.actors.engines.embedded.tensors import kv_bytes, plan_engine, weight_bytes
from myxa.actors.models.model_config import ModelConfig
from myxa.core.errors import EngineError
from myxa.core.host_memory import available_bytes

GIB = 1 << 30


SHAPE = cast(
    "ModelConfig",
    SimpleNamespace(num_layers=28, num_kv_heads=8, head_dim=128, context_length=40960, num_parameters=596_000_000),
)


def test_bytes_of_a_known_model():
    """Qwen3-0.6B: 28 layers x 2 x 8 heads x 128 x 2 bytes = 114688 bytes of keys and values per token in bfloat16."""
    assert kv_bytes(SHAPE, "bfloat16", num_slots=1, context_length=1) == 114_688 + 12
    assert kv_bytes(SHAPE, "float32", num_slots=3, context_length=100) == 300 * (2 * 114_688 + 12)
    assert weight_bytes(SHAPE, "float32") == 2 * 4 * 596_000_000


def test_plenty_of_memory_gives_what_was_asked_for():
    """0 asks for the model's own context."""
    for length, own in ((512, 512), (0, 40960)):
        plan = plan_engine(
            SHAPE, dtype="bfloat16", max_running=2, context_length=length, available_bytes=64 * GIB, share=0.6
        )
        assert (plan.num_slots, plan.context_length) == (2, own)
        assert plan.weight_bytes + plan.kv_bytes <= 0.6 * 64 * GIB


def test_scarce_memory_gives_the_most_slots_that_fit():
    plan = plan_engine(SHAPE, dtype="float32", max_running=64, context_length=4096, available_bytes=24 * GIB, share=0.6)
    room = int(24 * GIB * 0.6)
    slot = kv_bytes(SHAPE, "float32", num_slots=1, context_length=4096)
    assert 1 <= plan.num_slots < 64
    assert plan.weight_bytes + plan.kv_bytes <= room < plan.weight_bytes + plan.kv_bytes + slot


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"available_bytes": 2 * GIB}, r"4,768,000,000 bytes of weights.*do not fit into 1,288,490,188 bytes \(60% of"),
        ({"available_bytes": 0}, "do not fit into 0 bytes"),
        ({"context_length": 40961}, r"context_length 40961 is outside 2\.\.40960"),
        ({"context_length": -1}, "context_length -1"),
    ],
)
def test_what_cannot_work_is_refused_with_numbers(changes, says):
    settings = {
        "dtype": "float32",
        "max_running": 8,
        "context_length": 1024,
        "available_bytes": 64 * GIB,
        "share": 0.6,
    } | changes
    with pytest.raises(EngineError, match=says) as caught:
        plan_engine(SHAPE, **settings)
    assert caught.value.remedy


def test_the_host_tells_what_is_available():
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_a_control_group_tightens_it(tmp_path: Path):
    free = available_bytes(tmp_path)
    assert abs(free - available_bytes()) < 2 * GIB, "no files: the machine's own word"
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{80 << 20}\n")
    assert available_bytes(tmp_path) == 20 << 20
    (tmp_path / "memory.stat").write_text(
        f"anon {1 << 20}\ninactive_file {30 << 20}\nactive_file {10 << 20}\nshmem 5\n"
    )
    assert available_bytes(tmp_path) == 60 << 20, "page cache is given back on demand"
    (tmp_path / "memory.current").write_text(f"{300 << 20}\n")
    assert available_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 100 << 20


@pytest.mark.parametrize(
    ("line", "controller", "limit", "usage", "cache"),
    [
        ("0::/slurm/job_7/step_0", "", "memory.max", "memory.current", "active_file"),
        (
            "4:memory:/slurm/job_7/step_0",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_active_file",
        ),
    ],
)
def test_the_group_of_a_batch_job_tightens_it(
    line: str, controller: str, limit: str, usage: str, cache: str, tmp_path: Path
):
    """Without a container a process sees all groups of the machine, and the limit may be above its own."""
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{line}\n")
    job = tmp_path / controller / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / limit).write_text(f"{100 << 20}\n")
    (job / usage).write_text(f"{80 << 20}\n")
    (job / "memory.stat").write_text(f"shmem 7\n{cache} {5 << 20}\n")
    assert available_bytes(tmp_path, tmp_path / "own") == 25 << 20
    (job / "step_0" / limit).write_text(f"{10 << 20}\n")
    assert available_bytes(tmp_path, tmp_path / "own") == 10 << 20
    (tmp_path / "own").write_text(line.replace("job_7", "job_8"))
    assert available_bytes(tmp_path, tmp_path / "own") > 100 << 20, "another job's limit is not ours"
