"""Every mistake in a run file gets its file, line, path, value and cause; all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError

HEAD = '[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n'
KINDS = '"grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "sft"'
SECTIONS = sorted(field.alias or name for name, field in RunConfig.model_fields.items())
ALL_SECTIONS = f"known: {', '.join(SECTIONS[:12])} and {len(SECTIONS) - 12} more"


def failure(folder: Path, text: str | bytes, overrides: tuple[str, ...] = ()) -> str:
    file = folder / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(file), "run.toml")


RECORDED = '[roles.rollout]\nkind = "recorded"\n'

MISTAKES: list[tuple[str, str]] = [
    # unknown names
    ("[optimiser]\nlr = 1\n", 'run.toml:5: optimiser: is not a known section; did you mean "optimizer"?'),
    ("[xyz]\n", f"run.toml:5: xyz: is not a known section; {ALL_SECTIONS}"),
    ("[asynchrony]\nwindow = 3\n", 'run.toml:5: asynchrony: is not a known section; did you mean "async"?'),
    ("[algo]\nclip_lo = 0.2\n", 'run.toml:6: algo.clip_lo = 0.2: is not a known key; did you mean "clip_low"?'),
    ("[Algo]\n", 'run.toml:5: Algo: is not a known section; did you mean "algo"?'),
    ("[roles.rolout]\ncount = 2\n", 'run.toml:5: roles.rolout: is not a known role; did you mean "rollout"?'),
    (
        "[monitor]\nzzz = 1\n",
        "run.toml:6: monitor.zzz = 1: is not a known key; known: options, prometheus_port, samples_mb, samples_per_step, sinks, tensorboard, trace",
    ),
    # types
    ('[algo]\nbatch_size = "32"\n', 'run.toml:6: algo.batch_size = "32": must be a whole number'),
    ("[algo]\nbatch_size = 32.0\n", "run.toml:6: algo.batch_size = 32.0: must be a whole number"),
    ("[algo]\nbatch_size = true\n", "run.toml:6: algo.batch_size = true: must be a whole number"),
    ('[optimizer]\nlr = "high"\n', 'run.toml:6: optimizer.lr = "high": must be a number'),
    ("[optimizer]\nlr = nan\n", "run.toml:6: optimizer.lr = nan: must be a finite number"),
    ("[optimizer]\nlr = inf\n", "run.toml:6: optimizer.lr = inf: must be a finite number"),
    ("shuffle = 1\n", "run.toml:5: data.shuffle = 1: must be true or false"),
    ("system = 3\n", "run.toml:5: data.system = 3: must be text in quotes"),
    ("algo = 3\n", "run.toml:5: data.algo = 3: is not a known key; "),
    ("[rollout]\nstop_token_ids = 3\n", "run.toml:6: rollout.stop_token_ids = 3: must be an array"),
    (
        "[rollout]\nstop_token_ids = [\n  1,\n  '2',\n]\ntop_p = 0.5\n",
        'run.toml:6: rollout.stop_token_ids = [1, "2"]: must be a whole number',
    ),
    ("[reward]\nargs = 3\n", "run.toml:6: reward.args = 3: must be a table"),
    ("[optimizer]\nbetas = [0.9]\n", "run.toml:6: optimizer.betas = [0.9]: has too few elements"),
    ("[optimizer]\nbetas = [0.9, 1.0]\n", "run.toml:6: optimizer.betas = [0.9, 1.0]: must be below 1"),
    ("[optimizer]\nbetas = [0.9, 0.9, 0.9]\n", "run.toml:6: optimizer.betas = [0.9, 0.9, 0.9]: has too many elements"),
    # ranges
    ("[rollout]\ntemperature = -1\n", "run.toml:6: rollout.temperature = -1: must be at least 0"),
    ("[rollout]\ntop_p = 0\n", "run.toml:6: rollout.top_p = 0: must be greater than 0"),
    ("[rollout]\ntop_p = 1.5\n", "run.toml:6: rollout.top_p = 1.5: must be at most 1"),
    ("[rollout]\ntop_k = 0\n", "run.toml:6: rollout.top_k = 0: must be -1 (off) or at least 1"),
    ("[rollout]\nmin_p = 1.5\n", "run.toml:6: rollout.min_p = 1.5: must be at most 1"),
    ("[rollout]\nrepetition_penalty = 0\n", "run.toml:6: rollout.repetition_penalty = 0: must be greater than 0"),
    ("[rollout]\npresence_penalty = -3\n", "run.toml:6: rollout.presence_penalty = -3: must be at least -2"),
    ('[rollout]\nstop = [""]\n', "run.toml:6: rollout.stop = [\"\"]: '' is empty: it would end an answer at once"),
    ("[rollout]\nmin_new_tokens = 300\n", "run.toml:6: rollout.min_new_tokens = 300: is above max_new_tokens = 256"),
    (
        '[rollout]\ndeterministic = true\n[roles.rollout]\nkind = "sglang"\n',
        "run.toml:6: rollout.deterministic = true: needs sglang.enable_deterministic_inference = true: SGLang does not look at requests' seeds without",
    ),
    (
        '[rollout]\nmin_p = 0.1\n[roles.rollout]\nkind = "sglang"\n[sglang]\nenable_deterministic_inference = true\n',
        "run.toml:6: rollout.min_p = 0.1: must be 0 with seeds: SGLang's sampler ends the server when it is to do both; use top_p or top_k",
    ),
    ("[rollout]\nstop_token_ids = [-2]\n", "run.toml:6: rollout.stop_token_ids = [-2]: token ids must not be negative"),
    ("[algo]\nclip_low = 0\n", "run.toml:6: algo.clip_low = 0: must be greater than 0"),
    ("[algo]\nclip_high = -0.5\n", "run.toml:6: algo.clip_high = -0.5: must be greater than 0"),
    ("[algo]\nveto = 1.5\n", "run.toml:6: algo.veto = 1.5: must be at most 1"),
    ("[algo]\ndual_clip = 0.5\n", "run.toml:6: algo.dual_clip = 0.5: must be 0 (off) or greater than 1"),
    ("[async]\nmax_staleness = -1\n", "run.toml:6: async.max_staleness = -1: must be at least 0"),
    ("[monitor]\nprometheus_port = 70000\n", "run.toml:6: monitor.prometheus_port = 70000: must be at most 65535"),
    # choices and names
    ('[algo]\nkind = "grp"\n', f'run.toml:6: algo.kind = "grp": must be one of {KINDS}; did you mean "grpo"?'),
    ('[roles.buffer]\nkind = "b"\n', 'run.toml:6: roles.buffer.kind = "b": must be "buffer"'),
    (
        'preset = "alpaca"\n',
        'run.toml:5: data.preset = "alpaca": must be one of "slime", "verl", "chat", "plain", "recorded"',
    ),
    (
        '[run]\nname = "a/b"\n',
        "run.toml:6: run.name = \"a/b\": must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    ),
    (
        '[reward]\nfn = "exakt"\n',
        (
            'run.toml:6: reward.fn = "exakt": must be one of exact, numeric, math, f1, choice, regex, format, workflow, recorded, remote, or '
            'module:function, or file.py:function; did you mean "exact"?'
        ),
    ),
    ('[reward]\npattern = "("\n', 'run.toml:6: reward.pattern = "(": is not a regular expression: '),
    (
        '[engine]\nattach = ["host:1"]\n',
        'run.toml:6: engine.attach = ["host:1"]: "host:1" must look like http://host:port',
    ),
    ('[engine]\nattach = ["http://h:1", "http://h:1/"]\n', "names a server twice"),
    # a reference model that is served
    ('[algo]\nref_urls = ["h:1"]\n', 'run.toml:6: algo.ref_urls = ["h:1"]: "h:1" must look like http://host:port'),
    ('[algo]\nref_urls = ["http://h:1", "http://h:1/"]\n', "names a server twice"),
    ('[algo]\nref_urls = ["http://h:1", "recorded"]\n', '"recorded" must look like http://host:port'),
    (
        '[algo]\nref_urls = ["http://h:1"]\n',
        'run.toml:6: algo.ref_urls = ["http://h:1"]: needs algo.kl_coef above 0: without it the reference is not used',
    ),
    (
        '[algo]\nref_urls = ["http://h:1"]\nref_path = "m"\nkl_coef = 1\n',
        "does not go with ref_path: name a folder or servers, not both",
    ),
    (
        '[algo]\nref_urls = ["http://h:1"]\nkl_coef = 1\n[rollout]\ntemperature = 0.7\n',
        (
            "run.toml:9: rollout.temperature = 0.7: must be 1: the trainer scores samples at the temperature that they were "
            "drawn at, and servers give log-probs of given tokens at temperature 1 only; or use algo.ref_path"
        ),
    ),
    (
        '[algo]\nref_urls = ["recorded"]\nkl_coef = 1\n',
        'run.toml:6: algo.ref_urls = ["recorded"]: needs roles.rollout.kind = "recorded": log-probs are recorded of those answers only',
    ),
    (
        '[algo]\nref_key_env = "KEY"\n',
        'run.toml:6: algo.ref_key_env = "KEY": needs ref_urls, the servers that ask for the key',
    ),
    ("[algo]\nref_timeout_s = 0\n", "run.toml:6: algo.ref_timeout_s = 0: must be greater than 0"),
    # sources and devices
    (
        '[eval]\ndata = "h.jsonl@[3]"\n',
        "a slice must look like file@[10:100], with whole numbers on either side of the colon",
    ),
    ("[roles.rollout]\nnodes = 3\n", 'run.toml:6: roles.rollout.nodes = 3: must be "*", or an array'),
    ("[roles.rollout]\nnodes = []\n", "run.toml:6: roles.rollout.nodes = []: must name at least one node"),
    ("[roles.rollout]\nnodes = [1, 1]\n", "run.toml:6: roles.rollout.nodes = [1, 1]: names a node twice"),
    ("[roles.rollout]\nnodes = [-1]\n", "run.toml:6: roles.rollout.nodes = [-1]: node numbers must not be negative"),
    ("[roles.buffer]\ncount = 2\n", "run.toml:6: roles.buffer.count = 2: must be at most 1"),
    (
        "[roles.monitor]\nnodes = [0, 1]\n",
        "run.toml:6: roles.monitor.nodes = [0, 1]: this role has one actor in the whole run: name exactly one node",
    ),
    (
        '[roles.trainer]\ndevices = "gpu"\n',
        'run.toml:6: roles.trainer.devices = "gpu": must be "cpu" or GPU numbers like "0-3" or "0,2,5"',
    ),
    ('[roles.trainer]\ndevices = "3-0"\n', 'run.toml:6: roles.trainer.devices = "3-0": range "3-0" runs backwards'),
    ('[roles.trainer]\ndevices = "0,0"\n', 'run.toml:6: roles.trainer.devices = "0,0": names a GPU twice'),
    ('[roles.trainer]\ndevices = "99"\n', "GPU 99 is beyond the 64 a node can have"),
    (
        '[roles.trainer]\nrestart = "one"\n',
        'run.toml:6: roles.trainer.restart = "one": ranks cannot restart one by one; use "gang" or "never"',
    ),
    (
        '[roles.rollout]\nenv = {"A B" = "1"}\n',
        "'A B' is not a name of an environment variable",
    ),
    ("[roles.rollout]\nenv = {A = 1}\n", "run.toml:6: roles.rollout.env.A = 1: must be text in quotes"),
    # inside one section
    (
        "[algo]\nbatch_size = 30\nminibatches = 4\n",
        "run.toml:7: algo.minibatches = 4: does not divide batch_size = 30 (groups in one step)",
    ),
    (
        '[algo]\nkl_coef = 0.1\nkl_in = "advantage"\nkl_kind = "k3"\n',
        (
            'run.toml:8: algo.kl_kind = "k3": has no KL gradient with kl_in = "advantage" (it vanishes near the '
            'reference and pushes away from it further on); use "k1"'
        ),
    ),
    (
        '[algo]\nkl_coef = 0.1\nkl_kind = "k1"\nkl_unbiased = false\n',
        (
            'run.toml:7: algo.kl_kind = "k1": has a gradient of mean 0 in the loss: it holds nothing back; add '
            'kl_unbiased = true, or use "k2"'
        ),
    ),
    (
        '[algo]\nkl_coef = 0.1\nkl_kind = "k3"\nkl_unbiased = false\n',
        (
            'run.toml:7: algo.kl_kind = "k3": has the gradient of KL(reference || policy) in the loss, not of '
            'KL(policy || reference); add kl_unbiased = true, or use "k2"'
        ),
    ),
    (
        '[algo]\nkl_coef = 0.1\nkl_kind = "k2"\nkl_unbiased = true\n',
        ('run.toml:7: algo.kl_kind = "k2": has no KL gradient when it is weighted (kl_unbiased); use "k3" or "k1"'),
    ),
    (
        '[algo]\nkl_coef = 0.1\nkl_in = "advantage"\nkl_unbiased = true\n',
        'run.toml:8: algo.kl_unbiased = true: is for kl_in = "loss", not "advantage"',
    ),
    (
        '[algo]\nkl_in = "reward"\n',
        (
            'run.toml:6: algo.kl_in = "reward": is not defined for kind = "grpo", only for ppo, reinforce_pp, '
            'reinforce_pp_baseline; use "loss"'
        ),
    ),
    (
        "[algo]\nclip_low = 2\n",
        'run.toml:6: algo.clip_low = 2: must be at most 1 for kind = "grpo": ratios are not negative',
    ),
    (
        '[algo]\nkind = "cispo"\ndual_clip = 3.0\n',
        'run.toml:7: algo.dual_clip = 3.0: is not defined for the loss "cispo"; use 0',
    ),
    ("[algo]\nmis_low = 3\n", "run.toml:6: algo.mis_low = 3: must be below mis_high = 2"),
    (
        '[algo]\nadvantage_fn = "mine"\n',
        'run.toml:6: algo.advantage_fn = "mine": must be module:function, or file.py:function',
    ),
    (
        '[algo]\nkind = "ppo"\nadvantage_fn = "m:f"\n',
        'run.toml:7: algo.advantage_fn = "m:f": does not go with kind = "ppo", which makes advantages per token',
    ),
    (
        '[algo]\ncorrection = "tis"\nweight_fn = "m:f"\n',
        (
            'run.toml:7: algo.weight_fn = "m:f": does not go with correction = "tis", which is a weight; '
            'use "decoupled" or "behaviour"'
        ),
    ),
    (
        '[algo]\nloss = "cispo"\nloss_fn = "m:f"\n',
        'run.toml:6: algo.loss = "cispo": must be "auto": loss_fn takes its place',
    ),
    ("[algo]\nveto = 0.1\n", 'run.toml:6: algo.veto = 0.1: is for correction = "mis", not "auto"'),
    (
        '[algo]\ncorrection = "tis"\ntis_floor = 2.5\n',
        "run.toml:7: algo.tis_floor = 2.5: must be below tis_cap = 2",
    ),
    ('[algo]\ncorrection = "mis"\nreject_low = 0.5\n', "run.toml:7: algo.reject_low = 0.5: needs reject_high"),
    (
        '[algo]\ncorrection = "mis"\nmis_level = "geometric"\nmis_normalise = true\n',
        'run.toml:8: algo.mis_normalise = true: has no mean of geometric weights: use mis_level "token" or "sequence"',
    ),
    (
        '[algo]\ncorrection = "icepop"\nmis_low = 1.5\ntis_cap = 1.2\n',
        "run.toml:7: algo.mis_low = 1.5: must be below tis_cap = 1.2",
    ),
    ('[algo]\nloss = "sft"\n', 'run.toml:6: algo.loss = "sft": does not go with kind = "grpo"; use "auto"'),
    (
        "[optimizer]\nwarmup_steps = 10\ndecay_steps = 5\n",
        "run.toml:7: optimizer.decay_steps = 5: must be above warmup_steps = 10",
    ),
    (
        '[trainer]\nfreeze = ["embed"]\n[roles.trainer]\nkind = "megatron"\n',
        ": is the torch trainer's: Megatron trains all parameters",
    ),
    (
        '[optimizer]\nschedule = "wsd"\n',
        'run.toml:5: optimizer.wsd_decay_steps = 0 (default): must be set: schedule = "wsd" goes down at its end',
    ),
    (
        "[optimizer]\nwsd_decay_steps = 4\n",
        'run.toml:6: optimizer.wsd_decay_steps = 4: is for schedule = "wsd", not "constant"',
    ),
    (
        '[run]\nnum_steps = 10\n[optimizer]\nschedule = "wsd"\nwarmup_steps = 4\nwsd_decay_steps = 7\n',
        (
            "run.toml:10: optimizer.wsd_decay_steps = 7: and optimizer.warmup_steps are longer than the whole run of "
            "10 optimizer updates"
        ),
    ),
    (
        '[algo]\nref_path = "m"\n',
        ": needs algo.kl_coef above 0: without it no reference model is kept",
    ),
    ('[reward]\nfn = "regex"\n', 'run.toml:5: reward.pattern = "" (default): fn = "regex" needs a pattern'),
    ('messages_key = "m"\n', 'run.toml:5: data.messages_key = "m": is used by preset = "chat" only, not "slime"'),
    (
        'preset = "chat"\nprompt_key = "p"\n',
        'run.toml:6: data.prompt_key = "p": is not used by preset = "chat"; set messages_key',
    ),
    # between sections
    (
        '[algo]\nkind = "sft"\n',
        (
            'run.toml:3: data.answer_key = "" (default): algo.kind = "sft" needs demonstrations: name their column here, '
            'or use preset = "chat"'
        ),
    ),
    (
        'preset = "chat"\n[algo]\nkind = "sft"\n[rollout]\nworkflow = "single_turn"\n',
        'run.toml:9: rollout.workflow = "single_turn": must be "demonstration": algo.kind = "sft" learns from demonstrations',
    ),
    (
        'preset = "chat"\n[algo]\nkind = "sft"\n[rollout]\nnum_samples = 4\n',
        'run.toml:9: rollout.num_samples = 4: must be 1: algo.kind = "sft" has one demonstration per prompt',
    ),
    (
        '[rollout]\nworkflow = "demonstration"\n',
        'algo.kind = "grpo" (default): must be "sft": rollout.workflow = "demonstration" gives every sample the same reward',
    ),
    (
        "[rollout]\ntemperature = 0\n",
        'run.toml:6: rollout.temperature = 0: gives identical samples, from which algo.kind = "grpo" learns nothing; use 1.0',
    ),
    (
        "[rollout]\nnum_samples = 1\n",
        'run.toml:6: rollout.num_samples = 1: must be at least 2: algo.kind = "grpo" compares the samples of a group',
    ),
    (
        '[rollout]\nnum_samples = 1\n[algo]\nkind = "ppo"\ngroup_filter = "zero_variance"\n',
        'run.toml:9: algo.group_filter = "zero_variance": would leave out every group of one sample; use "none"',
    ),
    (
        '[eval]\ndata = "h.jsonl"\n[eval.sets.a]\npath = "a.jsonl"\n',
        "does not go with [eval.sets]: make it one of them, with a name",
    ),
    ('[eval.sets."a b"]\npath = "a.jsonl"\n', "a set's name is 1 to 64 letters, digits, '_' or '-', no sign first"),
    ('[eval.sets.reward]\npath = "a.jsonl"\n', "is the name of a metric; choose another one"),
    (
        '[eval.sets.a]\npath = "a.jsonl"\nreward = "regex"\n',
        'reward = "regex" needs a pattern',
    ),
    (
        '[eval.sets.a]\npath = "a.jsonl"\nreward_args = {x = 1}\n',
        "is for a function of the set's own: name it in `reward`",
    ),
    ('[eval.sets.a]\npath = "a.jsonl"\ntemperature = -0.5\n', "must be at least 0, or -1 (as in [eval])"),
    (
        '[engine]\ncontext_length = 512\n[eval.sets.a]\npath = "a.jsonl"\nmax_new_tokens = 512\n',
        "leaves no room for a prompt in engine.context_length = 512",
    ),
    (
        'apply_chat_template = false\n[eval.sets.a]\npath = "a.jsonl"\npreset = "chat"\n',
        'run.toml:8: eval.sets.a.preset = "chat": "chat" is for conversations; with plain texts use "plain"',
    ),
    (
        'apply_chat_template = false\n[eval.sets.a]\npath = "a.jsonl"\nsystem = "s"\n',
        'run.toml:8: eval.sets.a.system = "s": is for the chat template: set apply_chat_template = true',
    ),
    (
        'answer_key = "a"\n[eval]\ndata = "h.jsonl"\n[algo]\nkind = "sft"\n',
        'must be empty: algo.kind = "sft" has no engine that would answer',
    ),
    ("[eval]\nevery = 5\n", "run.toml:6: eval.every = 5: needs eval.data, the held-out prompts"),
    ("[run]\nstop_reward = 0.9\n", "run.toml:6: run.stop_reward = 0.9: needs evaluation: set eval.data and eval.every"),
    (
        "[run]\nnum_steps = 0\n",
        "run.toml:6: run.num_steps = 0: makes a run that never ends: set it, run.max_wall_s, run.stop_reward or data.max_passes",
    ),
    (
        'max_passes = 1\n[run]\nnum_steps = 0\n[optimizer]\nschedule = "cosine"\n',
        (
            "run.toml:8: optimizer.decay_steps = 0 (default): must be set: run.num_steps = 0 does not say where "
            'schedule = "cosine" ends'
        ),
    ),
    (
        '[run]\nnum_steps = 5\n[optimizer]\nschedule = "linear"\nwarmup_steps = 5\n',
        "run.toml:9: optimizer.warmup_steps = 5: is as long as the whole run of 5 optimizer updates",
    ),
    (
        '[engine]\nattach = ["http://h:1"]\n',
        'roles.rollout.kind = "embedded" (default): must be "sglang" when engine.attach is set',
    ),
    (
        '[engine]\nattach = ["http://h:1"]\n[roles.rollout]\nkind = "sglang"\ncount = 2\n',
        'run.toml:6: engine.attach = ["http://h:1"]: names 1 servers for 2 rollout actors; each needs its own',
    ),
    (
        '[engine]\nrouter = "http://h:1"\n[roles.rollout]\nkind = "sglang"\n',
        'run.toml:6: engine.router = "http://h:1": needs engine.attach: weights go to the servers themselves',
    ),
    (
        '[roles.rollout]\nkind = "sglang"\n[sglang]\nport = 30000\n',
        "run.toml:8: sglang.port = 30000: is myxa's own; leave it out: a free port is taken",
    ),
    (
        '[roles.rollout]\nkind = "sglang"\n[sglang]\nwhen = 2026-01-01\n',
        "sglang.when",
    ),
    (
        "[sglang]\ntp_size = 2\n",
        "is for servers that are launched",
    ),
    (
        "[engine]\ncontext_length = 64\n[rollout]\nmax_new_tokens = 64\n",
        "run.toml:8: rollout.max_new_tokens = 64: leaves no room for a prompt in engine.context_length = 64",
    ),
    (
        "[async]\nwindow = 66\n",
        "run.toml:6: async.window = 66: must be at most max_staleness * batch_size + 1 = 65: a wider window cannot keep the bound",
    ),
    (
        '[roles.trainer]\ndevices = "0-1"\ncount = 4\n',
        'run.toml:6: roles.trainer.devices = "0-1": names 2 GPUs for 4 ranks on each node; every rank needs its own',
    ),
    (
        '[reward]\nfn = "workflow"\n',
        (
            'run.toml:6: reward.fn = "workflow": needs a workflow of your own: rollout.workflow = "single_turn" says no '
            "reward"
        ),
    ),
    (
        "[rollout.workflow_args]\nnum = 3\n",
        'run.toml:5: rollout.workflow_args: is for a workflow of your own; "single_turn" takes none',
    ),
    (
        '[rollout]\nworkflow = "a:b"\nworkflow_args = { inner = [{ day = 2026-01-02 }] }\n',
        (
            "run.toml:7: rollout.workflow_args: must hold JSON values only, and inner[0].day = 2026-01-02 is none; write "
            "it as text"
        ),
    ),
    (
        '[roles.rollout]\ndevices = "0"\n',
        'run.toml:6: roles.rollout.devices = "0": must be "cpu": the embedded engine runs on the CPU',
    ),
    (
        f'preset = "chat"\n{RECORDED}',
        'run.toml:5: data.preset = "chat": must be "recorded": only prompts of a dump have an answer there',
    ),
    (
        f'system = "Be brief."\n{RECORDED}',
        (
            'run.toml:5: data.system = "Be brief.": is not used by preset = "recorded": dumped prompts are as they were '
            "read"
        ),
    ),
    (
        f"{RECORDED}[guard]\nevery = 5\n",
        (
            "run.toml:8: guard.every = 5: must be 0: recorded log-probs are of the weights of then, and the trainer's of "
            "those of now"
        ),
    ),
    (
        f'{RECORDED}[eval]\ndata = "p.jsonl"\n',
        "must be empty: to held-out prompts no answers are recorded",
    ),
    (
        f'{RECORDED}[weights]\nchannel = "nccl"\n',
        'run.toml:8: weights.channel = "nccl": is for servers: recorded engines take "shm" or "disk"',
    ),
    (
        f'{RECORDED}[memory]\nshare = "switch"\ncapacity_mb = 64\n',
        'must be "none": an engine without a model has no turn',
    ),
    (
        f'{RECORDED}devices = "0"\n',
        'run.toml:7: roles.rollout.devices = "0": must be "cpu": nothing is generated',
    ),
    (
        f'{RECORDED}[engine]\nattach = ["http://host:1"]\n',
        'run.toml:6: roles.rollout.kind = "recorded": must be "sglang" when engine.attach is set',
    ),
    (
        f'{RECORDED}[reward]\nfn = "recorded"\ntruncated = "zero"\n',
        'run.toml:9: reward.truncated = "zero": is for rewards that are computed in this run: leave it out',
    ),
    (
        '[reward]\nfn = "recorded"\n',
        (
            'run.toml:6: reward.fn = "recorded": needs roles.rollout.kind = "recorded": rewards are recorded of those '
            "answers only"
        ),
    ),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_one_mistake_gives_one_line(tmp_path: Path, text: str, expected: str) -> None:
    message = failure(tmp_path, HEAD + text)
    assert expected in message
    is_whole = expected.startswith("run.toml:") and not expected.endswith((": ", "; "))
    assert message == expected if is_whole else "\n" not in message


def test_a_widest_window_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + "[async]\nwindow = 65\n")
    assert load_config(file).asynchrony.window == 65


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """[run]
sed = 1
[model]
[data]
train = ""
[algo]
batch_size = 10
minibatches = 3
kind = "grp"
[eval]
every = 5
[optimizer]
lr = -1
"""
    message = failure(tmp_path, text, ("trainer.dtype=float33", "novalue"))
    assert message == (
        "run.toml: 9 problems\n"
        '  run.toml:2: run.sed = 1: is not a known key; did you mean "seed"?\n'
        "  run.toml:3: model.path: is missing: HuggingFace folder: config.json, safetensors, tokenizer files\n"
        '  run.toml:5: data.train = "": must not be empty\n'
        "  run.toml:8: algo.minibatches = 3: does not divide batch_size = 10 (groups in one step)\n"
        f'  run.toml:9: algo.kind = "grp": must be one of {KINDS}; did you mean "grpo"?\n'
        "  run.toml:11: eval.every = 5: needs eval.data, the held-out prompts\n"
        "  run.toml:13: optimizer.lr = -1: must be greater than 0\n"
        "  --set novalue: must look like section.key=value\n"
        '  --set trainer.dtype=float33: trainer.dtype = "float33": must be one of "float32", "bfloat16"; '
        'did you mean "float32"?'
    )


def test_a_wrong_value_does_not_cause_a_second_report_through_its_default(tmp_path: Path) -> None:
    message = failure(tmp_path, HEAD + '[algo]\nbatch_size = "x"\nminibatches = 5\n')
    assert message == 'run.toml:6: algo.batch_size = "x": must be a whole number'


def test_a_default_at_fault_is_told_once_however_many_values_depend_on_it(tmp_path: Path) -> None:
    text = HEAD + '[algo]\nkind = "sft"\n[rollout]\nworkflow = "demonstration"\n'
    assert failure(tmp_path, text).startswith('run.toml:3: data.answer_key = "" (default): algo.kind = "sft" needs')


def test_missing_sections_name_their_required_keys(tmp_path: Path) -> None:
    assert failure(tmp_path, "") == (
        "run.toml: 2 problems\n"
        "  run.toml: model.path: is missing: HuggingFace folder: config.json, safetensors, tokenizer files\n"
        "  run.toml: data.train: is missing: JSONL or parquet file, or a list of them; `file@[10:100]` takes rows 10 to 99"
    )


def test_a_section_that_is_no_table(tmp_path: Path) -> None:
    assert failure(tmp_path, 'model = "m"\n[data]\ntrain = "t"\n') == 'run.toml:1: model = "m": must be a table'


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algo", "--set algo: must look like section.key=value"),
        ("=3", "--set =3: must look like section.key=value"),
        ("x=3", "--set x=3: must look like section.key=value"),
        ("a.b.=3", "--set a.b.=3: must look like section.key=value"),
        ("algo.x\n[run]\ny=3", "must look like section.key=value"),
        ("algo.batch_size=3\nminibatches=3", "is not a TOML value: it holds more than one value"),
        ("algo.batch_size=1e", 'algo.batch_size = "1e": must be a whole number'),
        ("rollout.stop_token_ids=[1", "rollout.stop_token_ids = [1: is not a TOML value: Unclosed array"),
        ("algo.clip_lo=1", 'algo.clip_lo = 1: is not a known key; did you mean "clip_low"?'),
    ],
)
def test_wrong_flags(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in failure(tmp_path, HEAD, (override,))


def test_text_that_is_not_toml(tmp_path: Path) -> None:
    assert failure(tmp_path, "[run\nname = 1\n").startswith("run.toml:1: is not TOML, column ")
    assert failure(tmp_path, '[run]\nname = "a\n').startswith("run.toml:2: is not TOML, column ")
    assert failure(tmp_path, "[run]\nx = 1\nx = 2\n").startswith("run.toml:3: is not TOML, column ")
    assert failure(tmp_path, 'x = """').startswith("run.toml:1: is not TOML: ")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml: there is no such run file -- check the path"):
        load_config(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory -- name a readable TOML file"):
        load_config(tmp_path)
    assert failure(tmp_path, b"[run]\nname = '\xff'\n") == "run.toml: is not UTF-8 text (byte 14) -- save it as UTF-8"
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


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'train = "t.jsonl"\n',
            '[data.sources]\na = { path = "p.jsonl", preset = "plain" }\n',
            'data.sources.a.preset = "plain": must be "recorded": only prompts of a dump have an answer there',
        ),
        (
            RECORDED,
            f'{RECORDED}[algo]\nkind = "sft"\n',
            'run.toml:6: roles.rollout.kind = "recorded": is an engine, and algo.kind = "sft" has none: leave it out',
        ),
    ],
)
def test_recorded_answers_need_a_dump_and_an_algorithm_with_an_engine(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert expected in failure(tmp_path, (HEAD + RECORDED).replace(old, new))


def test_recorded_answers_have_their_order_and_no_canary_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + RECORDED)
    config = load_config(file)
    assert (config.data.preset, config.data.shuffle, config.guard.every) == ("recorded", False, 0)
    config = load_config(file, overrides=["data.shuffle=true"])
    assert (config.data.preset, config.data.shuffle, config.guard.every) == ("recorded", True, 0)
    plain = load_config(file, overrides=["roles.rollout.kind=embedded"])
    assert (plain.data.preset, plain.data.shuffle) == ("slime", True)
    assert plain.guard.every > 0
