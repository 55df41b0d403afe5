"""A value that is changed in a live run is judged by what the run file says of its keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.knobs.coordinator_room import open_room

from myxa.actors.knobs.owner import Knob
from myxa.actors.trainer.knobs import STEP_TUNABLES
from myxa.core.config import RunConfig
from myxa.core.config.root import EFFECTS
from myxa.core.config.section import Term, value_at

REPLAYS = {
    "megatron": {"routing_replay": "rollout"},
    "roles": {"trainer": {"kind": "megatron"}, "rollout": {"kind": "sglang"}},
    "sglang": {"enable_return_routed_experts": True},
    "weights": {"channel": "nccl"},
}
SERVED = {"algo": {"ref_urls": ("http://a:1",), "kl_coef": 0.1, "kl_kind": "k2"}}
SFT = {"data": {"train": "d.jsonl", "preset": "chat"}, "algo": {"kind": "sft"}}
DECAYS = {"schedule": "cosine", "decay_steps": 100, "warmup_steps": 10}
OFFLOADS = {
    "megatron": {"offload_optimizer": 0.5}, "trainer": {"dtype": "bfloat16"}, "roles": {"trainer": {"kind": "megatron"}},
}  # fmt: skip
HELD_OUT = {"eval": {"data": "e.jsonl", "every": 2}, "run": {"stop_reward": 0.9}}


def run_file(more: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}, **more})


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (REPLAYS, {"rollout.pause_mode": "retract"}, "megatron.routing_replay"),
    (REPLAYS, {"rollout.pause_mode": "abort"}, ""),
    (SERVED, {"rollout.temperature": 0.7}, "rollout.temperature"),
    (SERVED, {"algo.kl_coef": 0.0}, ""),
    (SFT, {"data.difficulty_high": 0.5}, "data.difficulty_high"),
    (SFT, {"rollout.num_samples": 2}, "rollout.num_samples"),
    ({}, {"rollout.num_samples": 1}, "rollout.num_samples"),
    ({"algo": {"kind": "reinforce_pp"}}, {"rollout.num_samples": 1, "algo.group_filter": "zero_variance"}, "algo.group_filter"),
    ({"algo": {"kind": "reinforce_pp"}}, {"rollout.num_samples": 1, "algo.group_filter": "none"}, ""),
    ({}, {"rollout.top_k": 0}, "rollout.top_k"),
    ({}, {"data.difficulty_low": 0.5}, "difficulty_high"),
    ({}, {"data.difficulty_low": 0.5, "data.difficulty_high": 0.7}, ""),
    ({}, {"eval.every": 3}, "eval.data"),
    ({}, {"run.stop_reward": 0.5}, "eval.data"),
    ({"eval": {"temperature": 0.5}}, {"eval.num_samples": 3}, "eval.num_samples"),
    ({"eval": {"temperature": 0.5}}, {"async.max_staleness": 1}, ""),
    (HELD_OUT, {"eval.every": 0}, ""),
    ({}, {"algo.reject_low": 2.0}, "algo.reject_low"),
    (OFFLOADS, {"trainer.checkpoint_every": 5}, "megatron.offload_optimizer"),
    ({"optimizer": DECAYS}, {"optimizer.decay_steps": 5}, "optimizer.decay_steps"),
    ({"run": {"num_steps": 0, "max_wall_s": 60.0}}, {"run.max_wall_s": 0.0}, "run.num_steps"),
    ({"optimizer": DECAYS, "run": {"num_steps": 0, "max_wall_s": 60.0}}, {"optimizer.decay_steps": 0}, "optimizer.decay_steps"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "values", "named"), CASES)
def test_what_a_file_may_not_say_is_refused_in_a_live_run(
    more: dict[str, Any], values: dict[str, Any], named: str
) -> None:
    said = run_file(more).refusal(values)
    assert named in said if named else not said, said


ALONE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"algo": {"gamma": 0.9}}, ["algo.gamma"]),
    ({"algo": {"kind": "ppo", "gamma": 0.9, "lam": 0.95}}, []),
    ({"algo": {"lam": 0.95}}, ["algo.lam"]),
    ({"algo": {"sapo_tau_pos": 2.0}}, ["algo.sapo_tau_pos"]),
    ({"algo": {"loss": "sapo", "sapo_tau_pos": 2.0, "clip_high": 0.3}}, ["algo.clip_high"]),
    ({"algo": {"kind": "dapo", "loss": "sapo"}}, []),
    ({"algo": {"correction": "tis", "tis_cap": 3.0, "clip_low": 0.1}}, ["algo.clip_low"]),
    ({"algo": {"correction": "tis", "tis_cap": 3.0, "clip_low": 0.1, "epochs": 2}}, []),
    ({"algo": {"tis_cap": 3.0}}, ["algo.tis_cap"]),
    ({"algo": {"tis_cap": 3.0, "minibatches": 2}}, []),
    ({"algo": {"kl_kind": "k1"}}, ["algo.kl_kind"]),
    ({"algo": {"kl_kind": "k2", "kl_coef": 0.1}}, []),
    ({"optimizer": {"decay_steps": 10, "wsd_decay": "cosine"}}, ["optimizer.decay_steps", "optimizer.wsd_decay"]),
    ({"optimizer": {"decay_steps": 10, "schedule": "linear"}}, []),
    ({"eval": {"temperature": 0.5}}, ["eval.temperature"]),
    ({"memory": {"switch_s": 60.0}}, ["memory.switch_s"]),
    ({"algo": {"kind": "sft"}, "data": {"train": "d", "preset": "chat", "learn": "last"}, "rollout": {"top_p": 0.9}}, ["rollout.top_p"]),
]  # fmt: skip


def test_keys_that_do_nothing_without_others_are_told_with_those() -> None:
    for more, keys in ALONE:
        assert sorted(conflict.path for conflict in run_file(more).without_effect()) == keys, more
    (gamma,) = run_file({"algo": {"gamma": 0.9}}).without_effect()
    assert gamma.cause.startswith('needs algo.kind = "ppo" or "reinforce_pp"')
    for line in EFFECTS:  # raises for a key that there is not
        terms = line.partition(": ")[0].replace(" needs ", " ").split()
        assert all(value_at(run_file({}), Term.parse(term).key) for term in terms)


async def test_the_coordinator_asks_the_run_file(tmp_path: Path) -> None:
    async with open_room(tmp_path, file=run_file({})) as room:
        reply = await asyncio.wait_for(room.change(eval_every=3), 20)
        assert not reply.epoch and "eval.data" in reply.refused
        assert (await asyncio.wait_for(room.change(max_wall_s=3600.0), 20)).epoch
        tunable = next(tunable for tunable in STEP_TUNABLES if tunable.name == "sapo_tau_pos")
        room.trainer.knob_owner.add([Knob(tunable, lambda: 1.0, lambda value: None)])
        reply = await asyncio.wait_for(room.change(sapo_tau_pos=2.0, dry_run=True), 20)
        assert (reply.refused, reply.warnings) == ("", (
            'sapo_tau_pos has no effect: it needs algo.loss = "sapo" or algo.loss_fn',
        ))  # fmt: skip
