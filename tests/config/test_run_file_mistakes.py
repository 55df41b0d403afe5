"""Every mistake in a run file gets its file, line, path, value and cause; all of them at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from myxa.core.config import RunConfig, dump_config, load_config
from myxa.core.config.section import find, named_section_of, section_of, walk
from myxa.core.errors import ConfigError

HEAD = '[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n'


def failure(folder: Path, text: str | bytes, overrides: tuple[str, ...] = ()) -> str:
    file = folder / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(file), "run.toml")


RECORDED = 'preset = "recorded"\n'

# Beside those of tests/error_cases.md. What is appended to HEAD: the line (-: none, as it is a default's) and the key that are named ? the name that is proposed ! words of the cause.
MISTAKES: dict[str, str] = {
    "[xyz]\n": "5 xyz",
    '[asynchrony]\npolicy = "wait"\n': "5 asynchrony ? async",
    "[async]\nwindow = 3\n": "6 async.window ! lower async.max_staleness",
    "[Algo]\n": "5 Algo ? algo",
    "[algo]\nbatch_size = true\n": "6 algo.batch_size",
    f"[algo]\nbatch_size = {2**64}\n": "6 algo.batch_size ! at most 64 bits",
    "[rollout]\nmax_new_tokens = 99999999999999999999\n": "6 rollout.max_new_tokens ! at most 64 bits",
    **{
        f'[reward]\nfn = "a:b"\nargs = {{ x = {value} }}\n': "7 reward.args ! must not hold nan"
        for value in ("nan", "2026-01-02", "2026-01-02T03:04:05", f"[{2**64}]")
    },
    '[eval.sets.a]\npath = "a.jsonl"\nreward = "a:b"\nreward_args = { x = nan }\n': "8 eval.sets.a.reward_args",
    "[algo]\ngroup_filter_args = { eps = nan }\n": "6 algo.group_filter_args",
    'chat_template_kwargs = { chat_template = "x" }\n': "5 data.chat_template_kwargs ! must not hold chat_template",
    '[lora]\nrank = 4\ntarget_modules = "q_proj"\n': "7 lora.target_modules ! array",
    "[algo]\nbatch_size = 32.0\n": "6 algo.batch_size ! must be a whole number",
    '[optimizer]\nlr = "high"\n': "6 optimizer.lr ! must be a number",
    "[optimizer]\nlr = nan\n": "6 optimizer.lr ! must be a finite number",
    "shuffle = 1\n": "5 data.shuffle",
    "system = 3\n": "5 data.system",
    "algo = 3\n": "5 data.algo ! did you mean the table [algo]?",
    "[rollout]\nstop_token_ids = 3\n": "6 rollout.stop_token_ids ! must be an array, in [...]",
    "[rollout]\nstop_token_ids = [\n  1,\n  '2',\n]\ntop_p = 0.5\n": "6 rollout.stop_token_ids",
    "[reward]\nargs = 3\n": "6 reward.args",
    '[optimizer]\nname = "muon"\n[roles.trainer]\nkind = "megatron"\n': "6 optimizer.name ! distributed_optimizer",
    "[optimizer]\nbetas = [0.9]\n": "6 optimizer.betas",
    "[optimizer]\nbetas = [0.9, 1.0]\n": "6 optimizer.betas",
    "[rollout]\ntop_p = 0\n": "6 rollout.top_p ! must be greater than 0",
    '[rollout]\nstop = [""]\n': "6 rollout.stop",
    "[rollout]\nmin_new_tokens = 300\n": "6 rollout.min_new_tokens",
    '[rollout]\ndeterministic = true\n[roles.rollout]\nkind = "sglang"\n': "6 rollout.deterministic",
    '[rollout]\nmin_p = 0.1\n[roles.rollout]\nkind = "sglang"\n[sglang]\nenable_deterministic_inference = true\n': "6 rollout.min_p",
    "[rollout]\nstop_token_ids = [-2]\n": "6 rollout.stop_token_ids",
    **{
        f'[roles.rollout]\nkind = "sglang"\ndevices = "0"\n[rollout]\n{line}\n[sglang]\nspeculative_algorithm = "NGRAM"\n': f"9 rollout.{line.split()[0]} ! sglang.speculative_algorithm"
        for line in ("min_p = 0.1", "min_new_tokens = 3", "repetition_penalty = 1.1", "presence_penalty = 0.5")
    },
    **{
        f'[roles.rollout]\nkind = "sglang"\n[sglang]\ntp_size = {size}\n': "8 sglang.tp_size ! whole number"
        for size in ('"2"', "-2", "true", "2.0")
    },
    '[roles.rollout]\nkind = "sglang"\n[sglang]\nspeculative_algorithm = "NGRAM"\n': "8 sglang.speculative_algorithm ! GPU",
    **{
        f'[roles.rollout]\nkind = "sglang"\ndevices = "0"\n[sglang]\nspeculative_algorithm = {value}\n': said
        for value, said in {
            '"NGRAMM"': "9 sglang.speculative_algorithm ! did you mean NGRAM",
            '"DFLASH"': "9 sglang.speculative_algorithm ! log-probs",
            '"eagle3"': "8 sglang.speculative_draft_model_path",
            '"NGRAM"\nspeculative_accept_threshold_acc = 0.5': "10 sglang.speculative_accept_threshold_acc",
            '"NGRAM"\npp_size = 2': "9 sglang.speculative_algorithm ! pp_size",
            '"NGRAM"\nenable_dp_attention = true': "9 sglang.speculative_algorithm ! enable_dp_attention",
        }.items()
    },
    '[rollout]\nreplay_sampling = true\n[roles.rollout]\nkind = "sglang"\n': "6 rollout.replay_sampling",
    '[megatron]\nmtp = 0.2\npp = 2\n[roles.trainer]\nkind = "megatron"\ncount = 2\n': "6 megatron.mtp ! needs pp = 1",
    '[megatron]\nmtp_reaches_trunk = true\n[roles.trainer]\nkind = "megatron"\n': "6 megatron.mtp_reaches_trunk ! mtp",
    '[megatron]\nrouting_replay = "rolout"\n[roles.trainer]\nkind = "megatron"\n': "6 megatron.routing_replay",
    '[megatron]\nrouting_replay = "rollout"\n[roles.trainer]\nkind = "megatron"\n[roles.rollout]\nkind = "sglang"\n': "6 megatron.routing_replay ! sglang.enable_return_routed_experts = true",
    '[sglang]\nenable_return_routed_experts = true\npp_size = 2\n[megatron]\nrouting_replay = "rollout"\n[roles.trainer]\nkind = "megatron"\n[roles.rollout]\nkind = "sglang"\n': "7 sglang.pp_size",
    "[algo]\nclip_low = 0\n": "6 algo.clip_low",
    "[weights]\nfull_every = 5\n": '6 weights.full_every ! needs weights.channel = "disk"',
    "[weights]\nfull_evry = 5\n": "6 weights.full_evry ? full_every",
    '[weights]\nchannel = "disk"\nfull_every = 5\n[roles.rollout]\nkind = "sglang"\n[engine]\nattach = ["http://10.0.0.1:1"]\n': "7 weights.full_every ! another host",
    '[weights]\nchannel = "tcp"\n[roles.rollout]\nkind = "sglang"\n[engine]\nattach = ["http://10.0.0.1:1"]\n': "6 weights.channel ! another host",
    "[algo]\nclip_high = -0.5\n": "6 algo.clip_high",
    "[algo]\nveto = 1.5\n": "6 algo.veto",
    "[algo]\nref_update_every = 5\n": "6 algo.ref_update_every",
    "[algo]\nepochs = 0\n": "6 algo.epochs",
    "[algo]\ndual_clip = 0.5\n": "6 algo.dual_clip",
    "[async]\nmax_staleness = -1\n": "6 async.max_staleness ! must be at least 0",
    "[control]\ndashboard_port = 70000\n": "6 control.dashboard_port ! must be at most 65535",
    "[monitor]\nprometheus_port = 9100\n": "6 monitor.prometheus_port ! control.dashboard_port",
    '[roles.buffer]\nkind = "b"\n': "6 roles.buffer.kind",
    'preset = "alpaca"\n': '5 data.preset ! must be one of "slime"',
    '[run]\nname = "a/b"\n': "6 run.name ! letters, digits",
    '[reward]\nfn = "exakt"\n': "6 reward.fn ? exact",
    '[reward]\npattern = "("\n': "6 reward.pattern ! is not a regular expression",
    '[engine]\nattach = ["host:1"]\n': "6 engine.attach ! must look like http://host:port",
    '[engine]\nattach = ["http://h:1", "http://h:1/"]\n': "6 engine.attach",
    **{
        f'[engine]\nattach = ["{url}"]\n': "6 engine.attach ! an IPv6 host is written in [...]"
        for url in ("http://h:99999", "http://h:abc", "http://fe80::1:3000", "http://[::1:3000")
    },
    '[algo]\nref_urls = ["h:1"]\n': "6 algo.ref_urls",
    '[algo]\nref_urls = ["http://h:1", "http://h:1/"]\n': "6 algo.ref_urls",
    '[algo]\nref_urls = ["http://h:1"]\n': "6 algo.ref_urls",
    '[algo]\nref_urls = ["http://h:1"]\nref_path = "m"\nkl_coef = 1\n': "6 algo.ref_urls",
    '[algo]\nref_urls = ["http://h:1"]\nkl_coef = 1\n[rollout]\ntemperature = 0.7\n': "9 rollout.temperature",
    '[algo]\nref_urls = ["recorded"]\nkl_coef = 1\n': "6 algo.ref_urls",
    '[algo]\nref_key_env = "KEY"\n': "6 algo.ref_key_env",
    '[eval]\ndata = "h.jsonl@[3]"\n': "6 eval.data",
    "[roles.rollout]\nnodes = []\n": "6 roles.rollout.nodes",
    "[roles.rollout]\nnodes = [1, 1]\n": "6 roles.rollout.nodes",
    "[roles.buffer]\ncount = 2\n": "6 roles.buffer.count",
    "[roles.monitor]\nnodes = [0, 1]\n": "6 roles.monitor.nodes ! name exactly one node",
    '[roles.trainer]\ndevices = "gpu"\n': "6 roles.trainer.devices",
    '[roles.trainer]\ndevices = "0,0"\n': "6 roles.trainer.devices ! names a GPU twice",
    '[roles.trainer]\ndevices = "99"\n': "6 roles.trainer.devices",
    '[roles.rollout]\nenv = {"A B" = "1"}\n': "6 roles.rollout.env",
    "[roles.rollout]\nenv = {A = 1}\n": "6 roles.rollout.env.A",
    **{
        f'[roles.rollout]\nenv = {{A = "{value}"}}\n': "6 roles.rollout.env ! what a shell replaces"
        for value in ("$HOME/bin:$PATH", "/usr/lib:$LD_LIBRARY_PATH", "~/lib", "${B}", "--dir=$HOME")
    },
    '[roles.trainer]\ndevices = "0"\nenv = {CUDA_VISIBLE_DEVICES = "4"}\n': "7 roles.trainer.env.CUDA_VISIBLE_DEVICES",
    '[agent]\nenv = {A = "$B"}\n': "6 agent.env ! what a shell replaces",
    '[environments.a]\nkind = "gym"\nid = "a:B"\nenv = {"A B" = "x"}\n': "8 environments.a.env",
    **{
        f'[agent]\ncommand = "{command}"\n': "6 agent.command ! which only a shell understands"
        for command in ("python a.py --task $MYXA_TASK_FILE", "python ~/a.py", "cd x && python a.py", "a > log")
    },
    '[roles.trainer]\nenv = {MASTER_PORT = "29500"}\n': "6 roles.trainer.env.MASTER_PORT ! count and nodes",
    "[trainer]\nlr = 0.1\n": "6 trainer.lr ! there is critic.lr and optimizer.lr",
    '[trainer]\ndevices = "0"\n': "6 trainer.devices ! there is roles.trainer.devices",
    '[algo]\n"b\u0430tch_size" = 8\n': '6 algo."b\u0430tch_size" ! (it has U+0430, CYRILLIC SMALL LETTER A)',
    '[algo]\nkind = "ppo\u200b"\n': '6 algo.kind ! (it has U+200B, ZERO WIDTH SPACE); did you mean "ppo"?',
    "[algo]\nbatch_size = 1e3\n": "6 algo.batch_size ! without a point or an exponent",
    "[models.other]\n": "5 models.other.path ! or a model of the hub",
    '[algo]\nkl_coef = 0.1\nkl_in = "advantage"\nkl_kind = "k3"\n': "8 algo.kl_kind",
    '[algo]\nkl_coef = 0.1\nkl_kind = "k1"\nkl_unbiased = false\n': "7 algo.kl_kind",
    '[algo]\nkl_coef = 0.1\nkl_kind = "k3"\nkl_unbiased = false\n': "7 algo.kl_kind",
    '[algo]\nkl_coef = 0.1\nkl_kind = "k2"\nkl_unbiased = true\n': "7 algo.kl_kind",
    '[algo]\nkl_coef = 0.1\nkl_in = "advantage"\nkl_unbiased = true\n': "8 algo.kl_unbiased",
    '[algo]\nkl_in = "reward"\n': "6 algo.kl_in",
    'preset = "chat"\n[algo]\nkind = "sft"\nkl_in = "advantage"\n': "8 algo.kl_in",
    "[algo]\nclip_low = 2\n": "6 algo.clip_low",
    '[algo]\nkind = "cispo"\ndual_clip = 3.0\n': "7 algo.dual_clip",
    '[algo]\nloss = "dppo_tv"\ncorrection = "decoupled"\n': "6 algo.loss",
    "[algo]\nsapo_tau_pos = 0.0\n": "6 algo.sapo_tau_pos",
    '[algo]\nkind = "rloo"\nnormalise = "batch"\n': "7 algo.normalise",
    "[algo]\nwhiten = false\n": "6 algo.whiten",
    '[algo]\nkind = "grpo"\ncritic_lam = 0.9\n': "7 algo.critic_lam",
    "[algo]\nnormalise_std = false\n": "6 algo.normalise_std",
    "[algo]\nmis_low = 3\n": "6 algo.mis_low",
    '[algo]\nadvantage_fn = "mine"\n': "6 algo.advantage_fn",
    '[algo]\nkind = "ppo"\nadvantage_fn = "m:f"\n': "7 algo.advantage_fn",
    '[algo]\ncorrection = "tis"\nweight_fn = "m:f"\n': "7 algo.weight_fn",
    '[algo]\nloss = "cispo"\nloss_fn = "m:f"\n': "6 algo.loss",
    '[algo]\ncorrection = "tis"\ntis_floor = 2.5\n': "7 algo.tis_floor",
    '[algo]\ncorrection = "mis"\nreject_low = 0.5\n': "7 algo.reject_low",
    '[algo]\ncorrection = "mis"\nmis_level = "geometric"\nmis_normalise = true\n': "8 algo.mis_normalise",
    '[algo]\ncorrection = "icepop"\nmis_low = 1.5\ntis_cap = 1.2\n': "7 algo.mis_low",
    '[algo]\nloss = "sft"\n': "6 algo.loss",
    "[optimizer]\nwarmup_steps = 10\ndecay_steps = 5\n": "7 optimizer.decay_steps",
    '[trainer]\nstrategy = "fsdp"\n[roles.trainer]\nkind = "megatron"\n': "6 trainer.strategy ! megatron.distributed_optimizer",
    '[optimizer]\nschedule = "wsd"\n': "5 optimizer.wsd_decay_steps",
    "[optimizer]\nwsd_decay_steps = 4\n": "6 optimizer.wsd_decay_steps",
    '[run]\nnum_steps = 10\n[optimizer]\nschedule = "wsd"\nwarmup_steps = 4\nwsd_decay_steps = 7\n': "10 optimizer.wsd_decay_steps",
    'messages_key = "m"\n': "5 data.messages_key",
    'preset = "chat"\nprompt_key = "p"\n': "6 data.prompt_key",
    'preset = "chat"\n[algo]\nkind = "sft"\n[rollout]\nworkflow = "single_turn"\n': "9 rollout.workflow",
    'preset = "chat"\n[algo]\nkind = "sft"\n[rollout]\nnum_samples = 4\n': "9 rollout.num_samples",
    '[rollout]\nworkflow = "demonstration"\n': "- algo.kind",
    "[rollout]\ntemperature = 0\n": "6 rollout.temperature ! use 1.0",
    '[rollout]\nnum_samples = 1\n[algo]\nkind = "ppo"\ngroup_filter = "zero_variance"\n': "9 algo.group_filter",
    '[eval]\ndata = "h.jsonl"\n[eval.sets.a]\npath = "a.jsonl"\n': "6 eval.data",
    '[eval.sets."a b"]\npath = "a.jsonl"\n': '5 eval.sets."a b"',
    '[eval.sets.reward]\npath = "a.jsonl"\n': "5 eval.sets.reward",
    '[eval.sets.a]\npath = "a.jsonl"\nreward = "regex"\n': "5 eval.sets.a.reward_pattern",
    '[eval.sets.a]\npath = "a.jsonl"\nreward_args = {x = 1}\n': "7 eval.sets.a.reward_args",
    '[eval.sets.a]\npath = "a.jsonl"\ntemperature = -0.5\n': "7 eval.sets.a.temperature",
    '[engine]\ncontext_length = 512\n[eval.sets.a]\npath = "a.jsonl"\nmax_new_tokens = 512\n': "9 eval.sets.a.max_new_tokens",
    'apply_chat_template = false\n[eval.sets.a]\npath = "a.jsonl"\npreset = "chat"\n': "8 eval.sets.a.preset",
    'apply_chat_template = false\n[eval.sets.a]\npath = "a.jsonl"\nsystem = "s"\n': "8 eval.sets.a.system",
    'answer_key = "a"\n[eval]\ndata = "h.jsonl"\n[algo]\nkind = "sft"\n': "7 eval.data",
    "[run]\nstop_reward = 0.9\n": "6 run.stop_reward",
    'max_passes = 1\n[run]\nnum_steps = 0\n[optimizer]\nschedule = "cosine"\n': "8 optimizer.decay_steps",
    '[run]\nnum_steps = 5\n[optimizer]\nschedule = "linear"\nwarmup_steps = 5\n': "9 optimizer.warmup_steps ! as long as the whole run",
    '[engine]\nattach = ["http://h:1"]\n[roles.rollout]\nkind = "sglang"\ncount = 2\n': "6 engine.attach",
    '[engine]\nattach = ["http://me:word@h:1"]\nkey_env = "KEY"\n[roles.rollout]\nkind = "sglang"\n': "7 engine.key_env",
    '[engine]\nattach = ["http://h:1", "http://i:1"]\n[roles.rollout]\nkind = "sglang"\n': "6 engine.attach",
    '[engine]\nrouter = "http://h:1"\n[roles.rollout]\nkind = "sglang"\n': "6 engine.router",
    '[roles.rollout]\nkind = "sglang"\n[sglang]\nwhen = 2026-01-01\n': "8 sglang.when",
    "[sglang]\ntp_size = 2\n": "5 sglang",
    "[engine]\ncontext_length = 64\n[rollout]\nmax_new_tokens = 64\n": "8 rollout.max_new_tokens ! no room for a prompt",
    '[roles.trainer]\ndevices = "0-1"\ncount = 4\n': "6 roles.trainer.devices ! every rank needs its own",
    '[reward]\nfn = "workflow"\n': "6 reward.fn",
    "[rollout.workflow_args]\nnum = 3\n": "5 rollout.workflow_args",
    '[rollout]\nworkflow = "a:b"\nworkflow_args = { inner = [{ day = 2026-01-02 }] }\n': "7 rollout.workflow_args",
    '[roles.rollout]\ndevices = "0"\n': '6 roles.rollout.devices ! needs roles.rollout.devices = "cpu"',
    f'{RECORDED}[eval]\ndata = "p.jsonl"\n': "7 eval.data",
    f'{RECORDED}[memory]\nshare = "switch"\ncapacity_mb = 64\n': "7 memory.share",
    f"{RECORDED}[gateway]\neval_requests = 1\n": "7 gateway.eval_requests",
    f'{RECORDED}answer_key = "a"\n[algo]\nkind = "sft"\n': "5 data.preset",
    '[reward]\nfn = "recorded"\n': "6 reward.fn",
    '[roles.rollout]\nkind = "recorded"\n': "6 roles.rollout.kind",
    "[optimizer]\nlearning_rate = 1e-4\n": "6 optimizer.learning_rate ! here it is optimizer.lr",
    "[algo]\nepsilon_high = 0.28\n": "6 algo.epsilon_high ! here it is algo.clip_high",
    "[algo]\nmini-batch-size = 8\n": "6 algo.mini-batch-size ! here it is algo.minibatches (a number of updates, not a size)",
    'system = "Put it into \\boxed{}."\n': "5 data.system ! in single quotes",
    '[reward]\nfn = "a:b"\nargs = { form = ["\\frac{1}{2}"] }\n': "7 reward.args.form ! control character",
    "[eval]\nn = 3\n": "6 eval.n ! here it is eval.num_samples",
    "[wandb]\nproject = 3\n": "5 wandb ! here it is monitor.sinks",
    '[engine]\nattach = ["http://${HOST}:1"]\n': "6 engine.attach ! variable of the environment",
    '[monitor]\nsinks = ["wandb"]\n[monitor.options.wandb]\nproject = "${PROJECT}"\n': "7 monitor.options.wandb ! variable of the environment",
    "[algo]\nbatchsize = 8\n": "6 algo.batchsize ? batch_size",
    '[monitor]\ntensorboard = "no"\n': "6 monitor.tensorboard ! must be true or false",
    '[trainer]\nfreeze = ["("]\n': "6 trainer.freeze ! is not a regular expression",
    "[critic]\nenabled = true\n": '6 critic.enabled ! needs algo.kind = "ppo"',
    "[critic]\nlr = 0.1\n": "5 critic.enabled ! the table critic needs critic.enabled = true",
    '[algo]\nkind = "ppo"\n[critic]\nenabled = true\nwarmup_steps = 100\n': "9 critic.warmup_steps ! would never be trained",
    '[reward]\nfn = "exact"\nscope = "group"\n': "7 reward.scope ! judges one answer by itself",
    '[lora]\nrank = 8\nrollout = "adapter"\n[roles.rollout]\nkind = "sglang"\n[engine]\nrouter = "http://r:1"\n'
    'attach = ["http://a:1"]\n': "7 lora.rollout ! does not go with engine.router",
    '[weights]\nchannel = "nccl"\n': '6 weights.channel ! "shm" or "disk"',
}


CANNOT = {
    'disaggregation_transfer_backend = "nixl"': "name them in engine.groups",
    "encoder_only = true": "engine.attach",
    'lora_paths = ["a=b"]': 'lora.rollout = "adapter"',
    "max_lora_rank = 2": 'lora.rollout = "adapter"',
    "is_embedding = true": "generate",
    'ssl_keyfile = "k"': "plain HTTP",
    'chat_template = "x.jinja"': "data.chat_template",
    'revision = "main"': "org/name@revision",
    "grpc_mode = true": "HTTP",
}
"""Lines of [sglang] that ask for what a run cannot do, and what is said of them."""
MISTAKES |= {
    f'[roles.rollout]\nkind = "sglang"\n[sglang]\n{line}\n': f"8 sglang.{line.partition(' ')[0]} ! {words}"
    for line, words in CANNOT.items()
}


PAIR = """[engine.groups.p]
kind = "prefill"
[engine.groups.d]
kind = "decode"
[roles.rollout]
kind = "sglang"
"""
"""Lines 5 to 10."""
MISTAKES |= {
    PAIR.replace('[engine.groups.d]\nkind = "decode"\n', ""): "6 engine.groups.p.kind ! neither answers alone",
    PAIR.replace('[engine.groups.p]\nkind = "prefill"\n', ""): "6 engine.groups.d.kind ! neither answers alone",
    PAIR.replace('"decode"', '"decod"'): '8 engine.groups.d.kind ? decode',
    PAIR.replace('kind = "sglang"\n', ""): "- engine.groups ! needs roles.rollout.kind",
    PAIR + "count = 2\n[engine.groups.r]\nservers = 2\n": "11 roles.rollout.count ! must be 3, or a multiple",
    PAIR + "[engine.groups.r]\nserver = 2\n": "12 engine.groups.r.server ? servers",
    PAIR + "[engine.groups.r]\nservers = 0\n": "12 engine.groups.r.servers",
    PAIR + '[rollout]\npause_mode = "retract"\n': "12 rollout.pause_mode",
    PAIR + "[sglang]\nenable_deterministic_inference = true\n[rollout]\ndeterministic = true\n": "14 rollout.deterministic",
    PAIR + '[sglang]\ndisaggregation_mode = "decode"\n': "12 sglang.disaggregation_mode ! make groups of servers",
    PAIR.replace('"decode"\n', '"decode"\nsglang = { disaggregation_transfer_backend = "fake" }\n'):
        "9 engine.groups.d.sglang.disaggregation_transfer_backend ! sends nothing",
    PAIR.replace('"decode"\n', '"decode"\nsglang = { speculative_algorithm = "NGRAM" }\n'):
        "9 engine.groups.d.sglang.speculative_algorithm ! yet",
    PAIR.replace('"decode"\n', '"decode"\nsglang = { port = 3 }\n'): "9 engine.groups.d.sglang.port ! free port",
    PAIR + '[weights]\nchannel = "nccl"\n[sglang]\npp_size = 2\n': "12 weights.channel ! engine.groups.",
    '[roles.rollout]\nkind = "sglang"\n[engine]\nattach = ["http://h:1"]\n[engine.groups.r]\n': "7 engine.groups ! engine.attach",
    '[megatron]\nrouting_replay = "rollout"\n[roles.trainer]\nkind = "megatron"\n[sglang]\nenable_return_routed_experts = true\n'
    + PAIR: "6 megatron.routing_replay ! do not tell the experts of prompts",
}  # fmt: skip


@pytest.mark.parametrize(("text", "named"), MISTAKES.items(), ids=[str(i) for i in range(len(MISTAKES))])
def test_one_mistake_gives_one_line(tmp_path: Path, text: str, named: str) -> None:
    message = failure(tmp_path, HEAD + text)
    place, _, rest = named.partition(" ")
    rest, _, words = rest.partition(" ! ")
    key, _, proposed = rest.partition(" ? ")
    location = "run.toml" if place == "-" else f"run.toml:{place}"
    assert re.match(rf"{location}: {re.escape(key)}( = |: )", message), message
    assert "\n" not in message
    assert words in message, message
    assert not proposed or f'did you mean "{proposed}"?' in message, message


@pytest.mark.parametrize(
    "text",
    [
        *(f'[roles.rollout]\nkind = "sglang"\n[sglang]\n{line}\n'
          for line in ("enable_lora = false", 'disaggregation_mode = "null"', "log_level = 'info'")),
    ],
)  # fmt: skip
def test_what_switches_an_argument_off_is_accepted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + text)
    load_config(file)


def test_escapes_that_are_meant_stay(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = """system = 'In \\boxed{}.'\n[rollout]\nstop = ["\\f", "\\n\\t"]\n[reward]\npattern = "\\\\boxed"\n"""
    file.write_text(HEAD + text)
    config = load_config(file)
    assert (config.data.system, config.rollout.stop, config.reward.pattern) == (
        "In \\boxed{}.",
        ("\f", "\n\t"),
        "\\boxed",
    )
    frozen = dump_config(config).replace("In \\\\boxed", "In \\boxed")
    assert load_config(file, text=frozen).data.system == "In \boxed{}.", "what ran before still loads"


def test_relations_name_keys_that_there_are() -> None:
    fields = [field for _, field in walk(RunConfig)]
    inner = {
        inner_section
        for field in fields
        for inner_section in (section_of(field), named_section_of(field))
        if inner_section is not None
    }
    lines = [(section, line) for section in (RunConfig, *inner) for line in section.relations]
    assert len(lines) > 80
    for section, line in lines:
        for term in line.partition(": ")[0].split():
            key = re.split("!?=", term.removeprefix("!"))[0]
            _, field, keys_below = find(section, key.split("."))
            is_known = field is not None or not keys_below
            assert term in ("needs", "for") or (
                is_known and (not keys_below or key.startswith(("sglang.", "megatron.model.")))
            ), (line, key)


def test_all_wrong_values_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """[run]
sed = 1
[model]
[data]
train = ""
[algo]
kind = "grp"
[optimizer]
lr = -1
"""
    head, *messages = failure(tmp_path, text, ("trainer.dtype=float33", "novalue")).splitlines()
    assert head == "run.toml: 7 problems"
    places = [
        "run.toml:2: run.sed ", "run.toml:3: model.path: ", "run.toml:5: data.train ",
        "run.toml:7: algo.kind ", "run.toml:9: optimizer.lr ", "--set novalue: ",
        "--set trainer.dtype=float33: trainer.dtype ",
    ]  # fmt: skip
    assert [line.strip()[: len(place)] for line, place in zip(messages, places, strict=True)] == places


def test_all_conflicts_between_sections_are_told_once_each_section_is_right(tmp_path: Path) -> None:
    text = f"{HEAD}[eval]\nevery = 5\n[rollout]\nnum_samples = 1\n"
    _, *messages = failure(tmp_path, text).splitlines()
    assert [line.split(" = ")[0].split(": ")[1] for line in messages] == ["eval.every", "rollout.num_samples"]


def test_a_wrong_value_does_not_cause_a_second_report_through_its_default(tmp_path: Path) -> None:
    message = failure(tmp_path, HEAD + '[algo]\nbatch_size = "x"\nminibatches = 5\n')
    assert message == 'run.toml:6: algo.batch_size = "x": must be a whole number'


def test_a_default_at_fault_is_told_once_however_many_values_depend_on_it(tmp_path: Path) -> None:
    text = HEAD + '[algo]\nkind = "sft"\n[rollout]\nworkflow = "demonstration"\n'
    assert failure(tmp_path, text).startswith('run.toml:3: data.answer_key = "" (default): algo.kind = "sft" needs')


def test_missing_sections_name_their_required_keys(tmp_path: Path) -> None:
    messages = failure(tmp_path, "")
    assert "run.toml: model.path: " in messages and "run.toml: data.train = " in messages
    assert failure(tmp_path, 'model = "m"\n[data]\ntrain = "t"\n').startswith('run.toml:1: model = "m": ')


@pytest.mark.parametrize(
    ("override", "named"),
    [
        *((text, f"--set {text}: ") for text in ("algo", "=3", "x=3", "a.b.=3")),
        ("algo.x\n[run]\ny=3", "section.key=value"),
        ("algo.batch_size=3\nminibatches=3", "more than one value"),
        ("lr=3", "section.key=value; there is critic.lr and optimizer.lr"),
        ("num_generations=3", "section.key=value; here it is rollout.num_samples"),
        ("algo.batch_size=1e", 'algo.batch_size = "1e": '),
        ("rollout.stop_token_ids=[1", "rollout.stop_token_ids = [1: "),
        ("algo.clip_lo=1", "algo.clip_lo = 1: "),
        *(
            (f"data.chat_template_kwargs.enable_thinking={word}", f"enable_thinking = {word}: ")
            for word in ("False", "TRUE")
        ),
        ("reward.args.strict=True", "write true or false in small letters, or the text in quotes"),
        *((f"{key}=null", "TOML has no null: leave the key out") for key in ("trainer.resume", "reward.args.x")),
        *((f"{key}=.5", "digits on both sides of its point") for key in ("optimizer.lr", "reward.args.x")),
        *(
            (f"{key}={text}", f'{key} = "{text}": has a variable')
            for key in ("data.train", "run.dir", "model.path")
            for text in ("$DATA/x", "/scratch/$USER/x", "/x/run-${ID}", "/x/$(date)")
        ),
        *(
            (f"data.train={text}", f'data.train = "{text}": is an address')
            for text in ("s3://b/x.jsonl", "https://h/x.jsonl")
        ),
        ("run.dir=s3://bucket/runs", 'run.dir = "s3://bucket/runs": is an address: name a file or folder'),
        ("model.path=https://huggingface.co/a/b", "a model of the hub: org/name"),
        ("rollout.stop=[</s>]", "write text in quotes, and the whole flag in single ones"),
        ("--algo.batch_size=3", '--set --algo.batch_size=3: --algo: is not a known section; did you mean "algo"?'),
        ("reward.args.day=2026-01-02", "--set reward.args.day=2026-01-02: reward.args: must not hold nan"),
    ],
)
def test_wrong_flags(tmp_path: Path, override: str, named: str) -> None:
    assert named in failure(tmp_path, HEAD, (override,))


def test_text_that_is_not_toml(tmp_path: Path) -> None:
    assert failure(tmp_path, "[run\nname = 1\n").startswith("run.toml:1: is not TOML, column ")
    assert failure(tmp_path, '[run]\nname = "a\n').startswith("run.toml:2: is not TOML, column ")
    assert failure(tmp_path, "[run]\nx = 1\nx = 2\n").startswith("run.toml:3: is not TOML, column ")
    assert failure(tmp_path, 'x = """').startswith("run.toml:1: is not TOML: ")
    for text, name in {
        "x\u00a0= 1": "U+00A0, NO-BREAK SPACE",
        "x = \u201ca\u201d": "U+201C, LEFT DOUBLE QUOTATION MARK",
        "x = 3e\u20134 # \u00e9": "U+2013, EN DASH",
    }.items():
        assert f"(it has {name})" in failure(tmp_path, f"[run]\n{text}\n")
    assert "it has" not in failure(tmp_path, "[run]\nx = .5 # \u00e9\n")
    for value in (".5", "1.e-6", "042", "30s", "10%"):
        assert failure(tmp_path, f"[run]\nx = {value}\n").endswith("or 1e-6, without a unit"), value
    for value in ("None", "null"):
        assert failure(tmp_path, f"[run]\nx = {value}\n").endswith("TOML has no null: leave the key out"), value
    assert failure(tmp_path, "[reward]\nargs = {\n  x = 1,\n}\n").endswith("or write a table [section.key]")
    assert failure(tmp_path, '[reward]\npattern = "(\\d+)"\n').endswith("in single quotes once")
    assert failure(tmp_path, "[run]\nx = True\n").endswith("true and false in small letters")
    assert failure(tmp_path, f"lr = 1e-6\n{HEAD}").endswith("there is critic.lr and optimizer.lr")
    (tmp_path / "run.yaml").write_text("model:\n  path: m\n")
    with pytest.raises(ConfigError, match="`myxa migrate` makes one"):
        load_config(tmp_path / "run.yaml")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml: there is no such run file -- check the path"):
        load_config(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="no such run file -- write --set before each"):
        load_config([tmp_path / "nope.toml", "algo.batch_size=8"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory -- name a readable TOML file"):
        load_config(tmp_path)
    assert failure(tmp_path, b"[run]\nname = '\xff'\n") == "run.toml: is not UTF-8 text (byte 14) -- save it as UTF-8"
    assert "cannot be read: maximum recursion depth" in failure(tmp_path, f"x = {'[' * 10_000}")
    with pytest.raises(ConfigError, match="no run file was given"):
        load_config([])


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode())
    assert load_config(file).data.preset == "slime"
    message = failure(tmp_path, b"\xef\xbb\xbf" + (HEAD + "[algo]\nbatch_size = 0\n").replace("\n", "\r\n").encode())
    assert message == "run.toml:6: algo.batch_size = 0: must be at least 1"


def test_the_file_that_set_a_value_last_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(HEAD + "[algo]\nbatch_size = 0\n")
    second.write_text("\n\n[algo]\nbatch_size = -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config([first, second])
    assert str(caught.value) == f"{second}:4: algo.batch_size = -1: must be at least 1"


def test_sources_are_all_recorded_or_none_is(tmp_path: Path) -> None:
    sources = '[data.sources]\na = { path = "p.jsonl", preset = "recorded" }\nb = { path = "p.jsonl" }\n'
    message = failure(tmp_path, HEAD.replace('train = "t.jsonl"\n', sources))
    assert "data.sources.b.preset" in message and "data.sources.a" not in message
