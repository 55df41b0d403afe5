"""Roles x nodes x devices -> actors, and the environment that each gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError
from myxa.launch.actor_spec import GangRendezvous, RankSpec
from myxa.launch.supervisor.placement import Present, place, scale
from myxa.launch.worker_spec import child_env


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n')
    return load_config(file, overrides)


def test_one_node_gets_every_role_in_start_order(tmp_path: Path):
    actors = place(config(tmp_path, "roles.rollout.count=2"), 1)
    assert [a.name for a in actors] == ["monitor", "buffer", "coordinator", "trainer/0", "rollout/0", "rollout/1"]
    assert {a.node for a in actors} == {0}
    assert {a.visible_devices for a in actors} == {()}


def test_a_star_means_every_node_and_indexes_run_over_nodes(tmp_path: Path):
    actors = place(config(tmp_path, 'roles.rollout.nodes="*"', "roles.rollout.count=2"), 3)
    rollouts = [(a.name, a.node) for a in actors if a.role == "rollout"]
    assert rollouts == [
        ("rollout/0", 0), ("rollout/1", 0), ("rollout/2", 1), ("rollout/3", 1), ("rollout/4", 2), ("rollout/5", 2),
    ]  # fmt: skip


def test_ranks_are_numbered_as_torchrun_does(tmp_path: Path):
    actors = place(
        config(tmp_path, "roles.trainer.nodes=[1, 2]", "roles.trainer.count=2", 'roles.trainer.devices="0-3"'), 3
    )
    ranks = [a for a in actors if a.role == "trainer"]
    assert [a.rank for a in ranks] == [
        RankSpec(gang="trainer", rank=r, world_size=4, local_rank=r % 2, local_world_size=2, group_rank=r // 2)
        for r in range(4)
    ]
    assert [a.node for a in ranks] == [1, 1, 2, 2]
    assert [a.devices for a in ranks] == [(0, 1), (2, 3)] * 2
    assert {a.visible_devices for a in ranks} == {(0, 1, 2, 3)}, "LOCAL_RANK picks among them"


def test_an_engine_that_reads_the_trainers_memory_sees_no_gpu_but_its_own(tmp_path: Path):
    flags = ('roles.rollout.kind="sglang"', "roles.trainer.count=4", "roles.rollout.count=2")
    shared = ('roles.trainer.devices="0-3"', 'roles.rollout.devices="0-3"')
    engines = [a for a in place(config(tmp_path, *flags, *shared), 1) if a.role == "rollout"]
    assert [a.devices for a in engines] == [a.visible_devices for a in engines] == [(0, 1), (2, 3)]


def test_groups_of_servers_deal_the_gpus_in_their_order(tmp_path: Path):
    """A rollout actor for each regular server, and one for prefill and decode servers; the same again on each node."""
    groups = (
        "engine.groups.a={sglang={tp_size=2}}", 'engine.groups.p={kind="prefill"}',
        'engine.groups.d={kind="decode", servers=2, sglang={tp_size=2, dp_size=2, enable_dp_attention=true}}',
        'roles.rollout.kind="sglang"', "roles.rollout.nodes=[0, 1]", 'roles.trainer.devices="7"',
    )  # fmt: skip
    whole = config(tmp_path, *groups, "roles.rollout.count=2", 'roles.rollout.devices="0-6"')
    engines = [a for a in place(whole, 2) if a.role == "rollout"]
    assert [a.devices for a in engines] == [(0, 1), (2, 3, 4, 5, 6)] * 2
    shapes = whole.engine.actors(whole.sglang)
    assert [[(one.kind, one.num_gpus) for one in shapes[a.index % 2]] for a in engines[:2]] == [
        [("regular", 2)], [("prefill", 1), ("decode", 2), ("decode", 2)],
    ]  # fmt: skip
    present = Present(tuple(a for a in place(whole, 2) if a.name != "rollout/2"), nodes=(0, 1))
    (joining,), leaving = scale(whole, "rollout", 4, present)
    assert (joining.name, joining.node, joining.devices, leaving) == ("rollout/2", 1, (0, 1), [])
    with pytest.raises(ConfigError, match=r"roles\.rollout\.devices names 5 GPUs, .* engine\.groups need 7"):
        place(config(tmp_path, *groups, "roles.rollout.count=2", 'roles.rollout.devices="0-4"'), 2)
    on_cpu = config(tmp_path, *groups[:4], "roles.rollout.count=2")
    assert [a.devices for a in place(on_cpu, 1) if a.role == "rollout"] == [(), ()]


def test_all_impossible_places_are_told_at_once(tmp_path: Path):
    wrong = config(
        tmp_path, "roles.rollout.nodes=[0, 4]", "roles.trainer.nodes=[2]", 'roles.trainer.devices="0-2"',
        "roles.trainer.count=2",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        place(wrong, 2)
    text = str(caught.value)
    assert "roles.rollout.nodes names node 4" in text
    assert "roles.trainer.nodes names node 2" in text
    assert "3 GPUs, which do not divide among 2 actors" in text


def test_a_rank_gets_torchruns_contract(tmp_path: Path):
    actors = place(
        config(tmp_path, "roles.trainer.count=2", "roles.trainer.threads=3", 'roles.trainer.devices="0,5"'), 1
    )
    second = next(a for a in actors if a.name == "trainer/1")
    base = {"PATH": "/bin", "RANK": "77", "ROLE_RANK": "77", "CUDA_VISIBLE_DEVICES": "9", "NO_PROXY": "here"}
    second = replace(second, attempt=2)
    meeting = GangRendezvous(address="h", port=5)
    env = child_env(base, second, spec_path="/s.json", run_id="run-1", meeting=meeting)
    assert env == {
        "PATH": "/bin", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "5",
        "TORCHELASTIC_RUN_ID": "run-1", "TORCHELASTIC_RESTART_COUNT": "2", "MYXA_WORKER_SPEC": "/s.json",
        "NO_PROXY": "here,localhost,127.0.0.1,::1", "no_proxy": "here,localhost,127.0.0.1,::1",
    }  # fmt: skip
    all_hosts = child_env({"no_proxy": "*"}, second, spec_path="/s.json", run_id="r", meeting=meeting)
    assert all_hosts["no_proxy"] == "*" and "NO_PROXY" not in all_hosts, "a star beside others means nothing"


def test_the_role_overrules_the_environment_but_not_who_the_worker_is(tmp_path: Path):
    actors = place(config(tmp_path, 'roles.buffer.env={OMP_NUM_THREADS = "7", MYXA_WORKER_SPEC = "x"}'), 1)
    buffer = next(a for a in actors if a.name == "buffer")
    env = child_env({"RANK": "3"}, buffer, spec_path="/s.json", run_id="r")
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["MYXA_WORKER_SPEC"] == "/s.json"
    assert "RANK" not in env


def test_a_rank_without_a_meeting_place_is_refused(tmp_path: Path):
    trainer = next(a for a in place(config(tmp_path), 1) if a.role == "trainer")
    with pytest.raises(ValueError, match="no meeting place"):
        child_env({}, trainer, spec_path="/s.json", run_id="r")
