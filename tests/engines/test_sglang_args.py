"""The command line of a server, sizes and environment, and what a server must be
told so that sampling means there what it means here: all pure."""

from __future__ import annotations

import argparse
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.engines.contract import ask
from tests.harness.fake_sglang import STAND_IN

from myxa.actors.engines.sglang.engine import ServerSampling
from myxa.actors.engines.sglang.launch import DEFAULTS, SglangLaunch, server_env, server_values
from myxa.actors.engines.sglang.server_args import SglangNeeds, check_sizes, command_line, stale_guesses
from myxa.core.config.servers import OWNED, ServerShape
from myxa.core.errors import ConfigError, RequestRefused
from myxa.launch.composition.trainer_parts import BOUNDS

SERVER_ARGS = STAND_IN / "sglang" / "srt" / "server_args.py"
SEEDED = {"enable_deterministic_inference": True}


def launch(**changes) -> SglangLaunch:
    plain = {
        "python": "python3", "model_path": "/m", "table": {}, "env": {}, "log_path": Path("/l"), "dtype": "bfloat16",
        "seed": 7, "num_devices": 0, "max_running": 64,
    }  # fmt: skip
    return SglangLaunch(**(plain | changes))


def test_the_command_line_means_the_table_to_the_servers_own_parser():
    table = {
        "tp_size": 2, "mem_fraction_static": 1, "enable_dp_attention": False,
        "disable_cuda_graph": True, "cuda_graph_bs": [1, 2, 4], "json_model_override_args": {"rope": {"type": "x y"}}, "quantization": "--odd",
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    runpy.run_path(str(SERVER_ARGS))["ServerArgs"].add_cli_args(parser)
    got = parser.parse_args(["--model-path=/m", *command_line(table)])
    assert (got.tp_size, got.mem_fraction_static, got.cuda_graph_bs) == (2, 1.0, [1, 2, 4])
    assert (got.disable_cuda_graph, got.enable_dp_attention, got.quantization) == (True, False, "--odd")
    assert json.loads(got.json_model_override_args) == {"rope": {"type": "x y"}}


def test_sizes_must_need_exactly_the_actors_gpus():
    assert sizes({}, 0) == {}
    assert sizes({}, 4) == {"tp_size": 4}
    assert sizes({"dp_size": 2}, 4) == {"tp_size": 2}
    assert sizes({"pp_size": 2, "dp_size": 2}, 8) == {"tp_size": 2}
    assert sizes({"dp_size": 4, "enable_dp_attention": True}, 4) == {"tp_size": 4}
    for values, needed in (
        ({"tp_size": 2}, 2), ({"dp_size": 3}, 3), ({"tp_size": 4, "pp_size": 2}, 8), ({"pp_size": 8}, 8),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^\[place\]: .* need {needed} GPUs, each server has 4"):
            sizes(values, 4)
        with pytest.raises(ConfigError, match=r"^\[engine.groups.wide.sglang\]: "):
            server_values(launch(table=values, num_devices=4, key="engine.groups.wide.sglang"), 1)


def sizes(table: dict[str, Any], num_devices: int, num_experts: int | None = None) -> dict[str, Any]:
    return check_sizes(ServerShape("regular", "place", table), num_devices, num_experts)


@pytest.mark.parametrize(
    ("values", "num_experts", "cause"),
    [
        ({"enable_dp_attention": True, "dp_size": 3}, 0, "dp_size 3 does not divide tp_size 4"),
        ({"enable_dp_attention": True, "dp_size": 2, "ep_size": 4}, 128, ""),
        ({"ep_size": 2}, 128, ""),
        ({"ep_size": 3}, 129, "ep_size 3: .* do not divide tp_size 4"),
        ({"ep_size": 2, "moe_dp_size": 4}, 128, "ep_size 2: with moe_dp_size it makes 8 ranks"),
        ({"ep_size": 4}, 6, "ep_size 4: it does not divide the 6 experts"),
        ({"ep_size": 4, "ep_num_redundant_experts": 2}, 6, ""),
        ({"ep_size": 4}, 0, "the model has no experts"),
        ({"moe_a2a_backend": "deepep"}, 6, "ep_size 4: it does not divide the 6 experts"),
        ({"moe_a2a_backend": "deepep"}, 0, "the model has no experts"),
        ({"ep_size": 4}, None, ""),
    ],
)
def test_ranks_share_attention_and_experts_only_where_that_divides(values, num_experts, cause):
    if not cause:
        assert sizes(values, 4, num_experts) == {"tp_size": 4}
    else:
        with pytest.raises(ConfigError, match=cause):
            sizes(values, 4, num_experts)


def test_what_is_myxas_own_is_always_said_and_the_users_word_counts_for_the_rest():
    values = server_values(launch(table={"stream_interval": 4, "mem_fraction_static": 0.7}), 1234)
    assert values == {
        "model_path": "/m", "host": "127.0.0.1", "port": 1234, "skip_tokenizer_init": True,
        "incremental_streaming_output": True, "dtype": "bfloat16", "random_seed": 7, "max_running_requests": 64,
        "device": "cpu", "stream_interval": 4, "mem_fraction_static": 0.7,
    }  # fmt: skip
    assert set(values) - {"stream_interval", "mem_fraction_static"} <= set(OWNED)
    on_gpus = server_values(launch(num_devices=2, context_length=512), 1234)
    assert on_gpus["tp_size"] == 2
    assert on_gpus["context_length"] == 512
    assert "device" not in on_gpus


def test_a_server_has_its_tokenizer_only_where_it_is_needed():
    values = server_values(launch(), 1234, SglangNeeds(tokenizer=True))
    assert values["skip_tokenizer_init"] is False
    assert "--skip-tokenizer-init" not in command_line(values)


def test_an_attached_server_that_cannot_do_what_the_run_needs_is_refused():
    needs = SglangNeeds(tokenizer=True, seeds=True)
    with pytest.raises(ConfigError, match="http://h:1: was started with --skip-tokenizer-init"):
        needs.check({"skip_tokenizer_init": True}, "http://h:1")
    with pytest.raises(ConfigError, match="http://h:1: was started without --enable-deterministic-inference"):
        needs.check({"enable_deterministic_inference": False}, "http://h:1")
    needs.check({"skip_tokenizer_init": False, "enable_deterministic_inference": True}, "http://h:1")
    needs.check({}, "http://h:1")


KEPT_BY_TOKENS = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")


def test_a_server_that_would_answer_with_older_weights_is_refused():
    wrong: dict[str, Any] = {**dict.fromkeys(KEPT_BY_TOKENS, "file"), "tokenizer_worker_num": 2}
    needs = SglangNeeds(channel="disk")
    for name, value in wrong.items():
        facts = {name: value, "version": "0.5.17"}
        said = f"http://h:1: was started with {name} = {value}: .*--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=said):
            needs.check(facts, "http://h:1")
        SglangNeeds().check(facts, "http://h:1")  # no weights come
    needs.check(dict.fromkeys(KEPT_BY_TOKENS, "file") | {"version": "0.5.23"}, "http://h:1")
    usual: dict[str, Any] = {**dict.fromkeys(KEPT_BY_TOKENS), "enable_lmcache": False, "tokenizer_worker_num": 1}
    needs.check(usual | {"enable_hierarchical_cache": True, "version": "0.5.17"}, "http://h:1")


def test_replicas_in_one_server_get_no_weights_from_devices():
    for channel, facts, is_refused in (
        ("nccl", {"dp_size": 2}, True), ("cuda_ipc", {"dp_size": 2, "enable_dp_attention": False}, True),
        ("disk", {"dp_size": 2}, False), ("", {"dp_size": 2}, False), ("nccl", {"dp_size": 1}, False),
        ("nccl", {"dp_size": 2, "enable_dp_attention": True}, False), ("nccl", {}, False),
    ):  # fmt: skip
        if is_refused:
            with pytest.raises(ConfigError, match=f"with dp_size = 2: .*{channel}.*into one replica"):
                SglangNeeds(channel=channel).check(facts, "http://h:1")
        else:
            SglangNeeds(channel=channel).check(facts, "http://h:1")


def test_a_server_that_sets_sampling_parameters_by_itself_is_refused():
    harmless = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    for preferred in (None, {}, harmless):
        SglangNeeds().check({"preferred_sampling_params": preferred}, "http://h:1")
    with pytest.raises(ConfigError, match="it would set min_p, repetition_penalty of requests"):
        facts = {"preferred_sampling_params": harmless | {"repetition_penalty": 1.05, "min_p": 0.1}}
        SglangNeeds().check(facts, "http://h:1")


GUESSING = {"model_path": "/m", "speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/m"}


@pytest.mark.parametrize(("needs", "facts", "words"), [
    (SglangNeeds(seeds=True), {}, r"depends on what was guessed"),
    (SglangNeeds(channel="disk"), {"speculative_draft_model_path": "/d"}, r"overwrites its draft"),
    (SglangNeeds(channel="disk"), {"speculative_algorithm": "NGRAM"}, r"ends when new weights come as folders"),
    (SglangNeeds(channel="disk", adapter_rank=4), {"speculative_algorithm": "NGRAM"}, r"with those they were not tried"),
    (SglangNeeds(), {"speculative_accept_threshold_single": 0.9}, r"threshold_single = 0\.9: must be 1"),
    (SglangNeeds(), {"speculative_algorithm": "DSPARK"}, r"no log-probs"),
    (SglangNeeds(), {"device": "cpu"}, r"needs a GPU"),
])  # fmt: skip
def test_a_server_that_guesses_tokens_is_refused_where_that_would_be_wrong(needs, facts, words):
    whole = {"device": "cuda", "enable_deterministic_inference": True, "pp_size": 1}
    SglangNeeds(channel="disk").check(whole | GUESSING, "http://h:1")
    with pytest.raises(ConfigError, match=rf"http://h:1.*{words}|{words}"):
        needs.check(whole | GUESSING | facts, "http://h:1")


def test_what_a_draft_cannot_follow_is_told():
    for channel, trains_layers, is_stale in (
        ("nccl", False, True), ("nccl", True, True), ("cuda_ipc", True, False), ("disk", True, False), ("", False, False),
    ):  # fmt: skip
        assert bool(stale_guesses(GUESSING, channel, trains_layers=trains_layers)) == is_stale
    assert stale_guesses(GUESSING | {"speculative_draft_model_path": "/d"}, "cuda_ipc", trains_layers=True)
    assert not stale_guesses({"speculative_algorithm": "NGRAM"}, "nccl")


def test_weights_that_guess_are_kept_when_a_servers_memory_leaves():
    for table, is_kept in ((GUESSING, True), ({"speculative_algorithm": "NGRAM"}, None), ({}, None)):
        values = server_values(launch(table=table, expects=()), 1234)
        assert values.get("enable_draft_weights_cpu_backup") is is_kept
    assert "enable_draft_weights_cpu_backup" not in server_values(launch(table=GUESSING), 1234)


@pytest.mark.parametrize("name", ["min_p", "min_new_tokens", "repetition_penalty", "presence_penalty"])
def test_what_a_server_that_guesses_would_draw_otherwise_is_refused(name: str):
    value = {"min_new_tokens": 2, "repetition_penalty": 1.5}.get(name, 0.5)
    with pytest.raises(RequestRefused, match=rf"here: {name} is {value:g}"):
        ServerSampling.of(GUESSING, (), 320).meant(ask("r", **{name: value}), "here")
    ServerSampling.of({}, (), 320).meant(ask("r", **{name: value}), "here")


def test_the_servers_environment():
    base = {
        "HOME": "/h", "MYXA_WORKER_SPEC": "/s", "RANK": "0", "NCCL_NVLS_ENABLE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }  # fmt: skip
    assert server_env(base, "/venv/bin/python", has_gpus=True) == {
        "HOME": "/h", "PATH": f"{os.defpath}:/venv/bin", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for has, direct in (({"NO_PROXY": "a"}, "a,127.0.0.1"), ({"no_proxy": "b", "NO_PROXY": "a"}, "b,127.0.0.1")):
        env = server_env({"http_proxy": "http://proxy:1"} | has, "", has_gpus=True)
        assert (env["no_proxy"], env["NO_PROXY"], env["http_proxy"]) == (direct, direct, "http://proxy:1")
    assert "NO_PROXY" not in server_env({"no_proxy": "*"}, "", has_gpus=True), "a star alone means all"
    assert server_env({"PATH": "/a"}, "python3", has_gpus=True)["PATH"] == "/a", "it is found there, or not at all"
    assert server_env({}, "", has_gpus=False)["SGLANG_USE_CPU_ENGINE"] == "1"


def test_the_page_names_everything_that_is_owned_or_set():
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    for name in (*OWNED, *DEFAULTS):
        assert f"`{name}`" in page, f"docs/engines.md does not name {name}"
    for bound in BOUNDS.values():
        assert f"| {bound:g} |" in page


# -- sampling


def test_end_tokens_of_the_models_configs_are_kept_away_too():
    server = ServerSampling.of({}, (257, 319, 320), 320)
    long_enough = ask("r", min_new_tokens=3, stop_token_ids=(5, 257))
    assert server.meant(long_enough, "here").sampling.stop_token_ids == (5, 257, 319)
    free = ask("r", stop_token_ids=(5,))
    assert server.meant(free, "here") is free


def test_requests_without_a_seed_have_each_their_own_where_seeds_count():
    server = ServerSampling.of(SEEDED, (), 320)
    seeds = [server.meant(ask("r"), "here").sampling.seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert server.meant(ask("r", seed=0), "here").sampling.seed == 0
    assert (
        ServerSampling.of({"enable_deterministic_inference": False}, (), 320).meant(ask("r"), "here").sampling.seed
        is None
    )


def test_min_p_never_reaches_a_server_that_it_would_end():
    with pytest.raises(RequestRefused, match=r"here: min_p is 0\.1, which ends a server that was started with"):
        ServerSampling.of(SEEDED, (), 320).meant(ask("r", min_p=0.1), "here")
    for facts in ({}, {"enable_deterministic_inference": False}):
        assert ServerSampling.of(facts, (), 320).meant(ask("r", min_p=0.1), "here").sampling.min_p == 0.1


def test_who_shares_the_batch_of_a_seeded_server_changes_no_draw():
    """SGLang sorts a batch before it draws if any of its requests has a top_k, its own health check too."""
    server = ServerSampling.of(SEEDED, (), 320)
    assert server.meant(ask("r", seed=1), "here").sampling.top_k == 320
    assert server.meant(ask("r", seed=1, top_k=5), "here").sampling.top_k == 5
    assert ServerSampling.of({}, (), 320).meant(ask("r"), "here").sampling.top_k == -1
