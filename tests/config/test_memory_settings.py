"""[memory]: what a run in which trainer and engine take turns must look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError
from myxa.launch.composition.memory_parts import Planned, manager_name, pool_bytes, start_timeout_s, takes_turns
from myxa.launch.supervisor.placement import place

HEAD = '[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n'
ON_HOST = '[memory]\nshare = "switch"\ncapacity_mb = 64\n'
ON_GPU = (
    '[memory]\nshare = "switch"\nworkspace_mb = 1024\n[sglang]\nmem_fraction_static = 0.8\n'
    '[roles.trainer]\nkind = "megatron"\ndevices = "0"\n[roles.rollout]\nkind = "sglang"\ndevices = "0"\n'
)


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(HEAD + text)
    return load_config(file, overrides)


def failure(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_nothing_is_shared_by_default(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert not takes_turns(config)
    assert [actor.name for actor in place(config, 1)] == ["monitor", "buffer", "coordinator", "trainer/0", "rollout/0"]


@pytest.mark.parametrize("text", [ON_HOST, ON_GPU], ids=["host", "gpu"])
def test_a_manager_is_started_before_its_tenants(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text)
    names = [actor.name for actor in place(config, 1)]
    assert names == ["monitor", "buffer", "coordinator", "memory/0", "trainer/0", "rollout/0"]
    assert manager_name(config) == "memory/0"


def test_engines_that_load_after_the_trainer_have_more_time(tmp_path: Path) -> None:
    turns, none = load(tmp_path, ON_GPU), load(tmp_path, "")
    assert start_timeout_s(turns) >= start_timeout_s(none) + turns.engine.start_s


def test_the_host_pool_is_what_is_copied_unless_it_is_named(tmp_path: Path) -> None:
    plan: Planned = {"params": (1000 << 20, "backup"), "grads": (2000 << 20, "discard")}
    plan = {**plan, "optimizer": (3000 << 20, "backup")}
    assert 4000 << 20 < pool_bytes(load(tmp_path, ON_HOST), plan) < 4400 << 20
    assert pool_bytes(load(tmp_path, ON_HOST, "memory.host_pool_gb=2.5"), plan) == 5 << 29


TWO_NODES = tuple(f"roles.{role}.nodes=[0, 1]" for role in ("trainer", "rollout", "memory"))


def test_turns_on_several_nodes_hand_weights_over_by_files(tmp_path: Path) -> None:
    assert takes_turns(load(tmp_path, ON_HOST, *TWO_NODES, 'weights.channel="disk"'))


@pytest.mark.parametrize("devices", ["0-3", "2-3", "1"])
def test_an_engine_may_have_all_of_the_trainers_devices_or_some(tmp_path: Path, devices: str) -> None:
    ranks = ("roles.trainer.count=4", 'roles.trainer.devices="0-3"')
    config = load(tmp_path, ON_GPU, *ranks, f'roles.rollout.devices="{devices}"')
    assert takes_turns(config)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (ON_GPU, ('roles.rollout.devices="0-1"',), "needs engines on devices that the trainer has"),
        (ON_GPU, ('roles.rollout.devices="cpu"',), "needs engines on devices that the trainer has"),
        (ON_GPU, ('roles.trainer.devices="cpu"',), "needs engines on devices that the trainer has"),
        (ON_HOST, ("roles.trainer.nodes=[1]",), "on the same nodes, all of them named"),
        (ON_GPU, ('engine.attach=["http://a:1"]', 'engine.router="http://b:1"'), "each server answers its own actor's"),
        (ON_HOST, ('algo.kind="sft"', 'data.preset="chat"'), "needs an engine that generates"),
    ],
)
def test_what_does_not_go_with_taking_turns(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: str
) -> None:
    assert expected in failure(tmp_path, text, *overrides)


def test_each_server_says_its_share_of_the_device_in_its_group_or_for_all(tmp_path: Path) -> None:
    bare = ON_GPU.replace("[sglang]\nmem_fraction_static = 0.8\n", "").replace('devices = "0"', 'devices = "0,1"')
    trainer, rollout = bare.split("[roles.rollout]\n")
    text = f"{trainer}count = 2\n[roles.rollout]\ncount = 2\n{rollout}"
    groups = (
        "[engine.groups.a.sglang]\nmem_fraction_static = 0.8\n[engine.groups.b.sglang]\nmem_fraction_static = 0.6\n"
    )
    assert takes_turns(load(tmp_path, text + groups))
    assert "sglang.mem_fraction_static: must be set" in failure(
        tmp_path, text + groups.replace("mem_fraction_static = 0.6", "")
    )
