"""What `myxa plan` tells of a good run: places, numbers, commands; and that it costs next to nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests.plan.planned import RUN, Site, plan

from myxa.actors.checkpoints.folder import Manifest, begin, commit, identity_of, rank_file, writer_of
from myxa.actors.models.hf_folder import read_config
from myxa.core.files import describe_file
from myxa.launch.checks.files import MAX_BYTES


def test_a_good_run(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in site.folder.iterdir() if path.name != "run.toml")
    code, answer = plan(site.write(RUN), capsys=capsys)
    assert (code, answer["ok"], answer["problems"]) == (0, True, [])
    actors = ["monitor", "buffer", "coordinator", "trainer/0", "trainer/1", "rollout/0", "rollout/1"]
    assert answer["placement"] == [
        {"devices": {"cpu": actors}, "num_processes": 7, "threads": 7, "interpreters": ["the launcher's"]}
    ]
    batch = answer["batch"]
    assert (batch["num_samples"], batch["samples_per_update"], batch["num_updates"]) == (32, 16, 40)
    assert batch["tokens_per_step"] == 32 * 32
    assert (batch["num_rows"], batch["passes"]) == (40, 20 * 8 / 40)
    assert batch["num_replicas"] == 2
    staleness = answer["staleness"]
    # N = (eta + 1) * B + 1 - W with W = 1 + B // 4, as in docs/walk-prompt.md
    assert (staleness["num_slots"], staleness["concurrency"]) == (24, 64)
    after = sorted(path.name for path in site.folder.iterdir() if path.name != "run.toml")
    assert after == before, "nothing was made"


SOURCES = """\
[data]
max_passes = 8
[data.sources.long]
path = "data/train.jsonl"
weight = 3
[data.sources.short]
path = "data/train.jsonl@[0:4]"
[data.sources.later]
path = "data/three.jsonl"
weight = 0
"""


def test_sources_of_prompts(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN.replace('[data]\ntrain = "data/train.jsonl"\n', SOURCES)
    code, answer = plan(site.write(text), capsys=capsys)
    assert answer["batch"]["num_draws"] == 8 * (40 + 4), "passes over rows of sources that have a weight"
    assert code == 0 and answer["problems"] == []
    for wrong, key, word in (
        (text.replace("data/three.jsonl", "data/none.jsonl"), "data.sources.later.path", "there is no file"),
        (text.replace("data/three.jsonl", "data/other_column.jsonl"), "data.sources.later.path", 'column "prompt" is'),
        (
            text.replace("weight = 3", "weight = 0")
            .replace("[0:4]", "[0:1]")
            .replace("max_passes = 8", "max_passes = 1"),
            "algo.batch_size",
            "than",
        ),
    ):
        code, answer = plan(site.write(wrong), capsys=capsys)
        assert code
        found = [one for one in answer["problems"] if one["key"] == key and word in one["message"]]
        assert found and found[0]["severity"] == "error", answer["problems"]


def test_neither_torch_nor_a_socket_is_touched(site: Site) -> None:
    site.write(RUN)
    code = (
        "import sys\n"
        "sys.modules['zmq'] = None  # an import of it would fail\n"
        "from myxa.launch.cli import main\n"
        "main(['plan', 'run.toml'])\n"
        "main(['doctor'])\n"
        "heavy = [name for name in ('torch', 'sglang', 'megatron.core') if name in sys.modules]\n"
        "sys.exit(f'{heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=site.folder, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no problems" in done.stdout and "to mend" in done.stdout, done.stdout
    assert "(2 + 1) * 8 = 24 slots" in done.stdout, "F6: and what they mean"
    assert "no token is more than 2 versions old" in done.stdout


def test_several_nodes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN.replace("[roles.rollout]\n", '[roles.rollout]\nnodes = "*"\n')
    code, answer = plan(site.write(text), "--nnodes", "3", capsys=capsys)
    assert code == 0, [one["message"] for one in answer["problems"]]
    assert answer["placement"][2]["devices"] == {"cpu": ["rollout/4", "rollout/5"]}


GPUS = """\
[sglang]
mem_fraction_static = 0.8
[memory]
share = "switch"
workspace_mb = 4096
"""


def test_gpus_that_are_not_here(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop plans for a GPU machine."""
    text = RUN.replace("[roles.trainer]\n", '[roles.trainer]\ndevices = "0-1"\nkind = "megatron"\n') + (
        'devices = "0-1"\nkind = "sglang"\n' + GPUS
    )
    code, answer = plan(site.write(text), "--elsewhere", "--device-gib", "80", capsys=capsys)
    assert (code, answer["problems"]) == (0, [])
    assert answer["placement"][0]["devices"]["GPU 1"] == ["trainer/1", "rollout/1"]
    phases = {load["phase"]: load for load in answer["memory"]}
    assert list(phases) == ["trainer's turn", "hand-over", "engine's turn", "trainer is away"]
    assert phases.pop("trainer is away")["capacity_bytes"] is None, "of a machine that is not here"
    assert all(load["capacity_bytes"] == 80 << 30 and load["fits"] for load in phases.values())
    code, answer = plan(site.write(text), capsys=capsys)
    assert code == 2
    modules = {one["message"].partition("no module ")[2].partition(",")[0] for one in answer["problems"]}
    assert {'"pynvml"', '"sglang"'} <= modules, "here, they are looked for"


@pytest.mark.parametrize(
    ("words", "severity", "says"),
    [
        ("speculative_algorithm = 'NGRAM'", "", ""),
        ("speculative_algorithm = 'NEXTN'", "error", "has not one layer that guesses"),
        ("speculative_algorithm = 'EAGLE3'\nspeculative_draft_model_path = '/d'", "warning", "fewer guesses are taken"),
        (
            "speculative_algorithm = 'NGRAM'\n[weights]\nchannel = 'disk'",
            "error",
            "ends when new weights come as folders",
        ),
    ],
)
def test_what_guesses_tokens(
    site: Site, capsys: pytest.CaptureFixture[str], words: str, severity: str, says: str
) -> None:
    text = RUN.replace("[roles.trainer]\n", '[roles.trainer]\ndevices = "0-1"\nkind = "megatron"\n')
    text += f'devices = "2-3"\nkind = "sglang"\n[sglang]\n{words}\n'
    code, answer = plan(site.write(text), "--elsewhere", "--device-gib", "80", capsys=capsys)
    assert code == (2 if severity == "error" else 0)
    found = [(one["severity"], one["key"]) for one in answer["problems"]]
    assert found == ([(severity, "sglang.speculative_algorithm")] if severity else [])
    assert all(says in one["message"] for one in answer["problems"])


@pytest.mark.parametrize(
    ("old", "new", "key", "word"),
    [
        ("checkpoint_every = 10", "", "trainer.checkpoint_every", "back to its start"),
        ('train = "data/train.jsonl"', 'train = "data/train.jsonl"\nmax_passes = 1', "data.max_passes", "ends after 5"),
        ("max_turns = 1", "max_turns = 1\ntop_p = 0.9", "rollout.top_p", "no correction sees that"),
        ("max_turns = 1", "max_turns = 1\nmin_p = 0.1", "rollout.min_p", "set it to 0"),
        ("max_turns = 1", "max_turns = 1\nrepetition_penalty = 1.1", "rollout.repetition_penalty", "not 1 on fresh"),
        ("max_turns = 1", "max_turns = 1\nmin_new_tokens = 4", "rollout.min_new_tokens", "not 1 on fresh"),
        ("max_turns = 1", "max_turns = 1\ndeterministic = true", "rollout.deterministic", "which weights a token meets"),
        ("lr = 1e-4", 'lr = 1e-4\nschedule = "cosine"\ndecay_steps = 5', "optimizer.decay_steps", "is 0 from that"),
        ("lr = 1e-4", "lr = 1e-4\nwarmup_steps = 40", "optimizer.warmup_steps", "never gets to its top, the run makes 40"),
        ("lr = 1e-4", "lr = 1e-4\ndecay_steps = 5", "optimizer.decay_steps", "has no effect: it needs optimizer.schedule"),
        ('[roles.trainer]\ncount = 2', '[roles.trainer]\ndevices = "0-3"\ncount = 2', "roles.trainer.devices", "uses one"),
    ],
)  # fmt: skip
def test_what_hardly_anybody_means(
    site: Site, capsys: pytest.CaptureFixture[str], old: str, new: str, key: str, word: str
) -> None:
    text = RUN.replace("[rollout]\n", "[rollout]\nmax_turns = 1\n")
    if not new:
        text = text.replace("num_steps = 20", "num_steps = 200")
    assert text.count(old) == 1
    code, answer = plan(site.write(text.replace(old, new)), "--elsewhere", capsys=capsys)
    assert code == 0, [one["message"] for one in answer["problems"]]
    (found,) = [one for one in answer["problems"] if one["key"] == key and word in one["message"] + one["remedy"]]
    assert found["severity"] == "warning"
    assert found["remedy"]
    assert found["line"]


def test_an_open_server_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN.replace("[engine]\n", '[engine]\nattach = ["http://gpu-host.invalid:30000", "http://127.0.0.1:30001"]\n')
    text = text.replace("[roles.rollout]\n", '[roles.rollout]\nkind = "sglang"\n')
    code, answer = plan(site.write(text), capsys=capsys)
    assert code == 0, [one["message"] for one in answer["problems"]]
    (found,) = [one for one in answer["problems"] if "without engine.key_env" in one["message"]]
    assert "gpu-host.invalid" in found["message"]
    assert "127.0.0.1" not in found["message"]
    absent = [one["message"] for one in answer["problems"] if "127.0.0.1:30001: GET /model_info" in one["message"]]
    assert len(absent) == 1


def test_a_large_file_is_not_read(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    large = site.folder / "data/large.jsonl"
    with large.open("wb") as file:
        file.write(b'{"prompt": "a", "label": "b"}\n')
        file.truncate(MAX_BYTES + 1)
    try:
        code, answer = plan(site.write(RUN.replace("train.jsonl", "large.jsonl")), capsys=capsys)
    finally:
        large.unlink()
    assert (code, answer["batch"]["num_rows"], answer["batch"]["passes"]) == (0, None, None)


def test_weights_that_the_run_leaves_alone_are_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers for multi-token prediction come behind the model's last one."""
    folder = site.folder / "drafting"
    shutil.copytree(site.folder / "model", folder)
    weights = load_file(folder / "model.safetensors")
    more = {f"model.layers.2.{name}.weight": weights["model.norm.weight"] for name in ("enorm", "shared_head.norm")}
    save_file(weights | more | {"lm_head.weight": weights["model.embed_tokens.weight"]}, folder / "model.safetensors")
    code, answer = plan(site.write(RUN.replace('"model"', '"drafting"')), "--elsewhere", capsys=capsys)
    assert code == 0
    (found,) = [one for one in answer["problems"] if "neither trained nor exported" in one["message"]]
    assert (found["severity"], found["key"]) == ("warning", "model.path")
    assert "2 weights" in found["message"] and "model.layers.2.*" in found["message"] and "MTP" in found["message"]


def checkpoint_of(site: Site, critic: dict[str, Any]) -> Path:
    """After 3 steps and 7 updates."""
    folder = site.folder / f"version_{1 + bool(critic)}"
    if not folder.exists():
        extra: dict[str, Any] = {"version": 3}
        partial = begin(folder, writer_of(extra))
        (partial / rank_file(0)).write_bytes(b"x")
        files = (describe_file(partial / rank_file(0)),)
        model = identity_of(read_config(site.folder / "model"))
        commit(
            folder,
            Manifest(format=1, model=model, world_size=1, num_updates=7, files=files, extra=extra, critic=critic),
        )
    return folder


@pytest.mark.parametrize(
    ("optimizer", "is_told"),
    [
        ('schedule = "cosine"\ndecay_steps = 7', True),
        ('schedule = "cosine"\ndecay_steps = 8', False),
        ('schedule = "cosine"\ndecay_steps = 7\nmin_lr_ratio = 0.1', False),
        ("decay_steps = 7", False),
    ],
)
def test_a_checkpoint_at_the_end_of_its_schedule(
    site: Site, capsys: pytest.CaptureFixture[str], optimizer: str, is_told: bool
) -> None:
    text = RUN.replace("checkpoint_every = 10", f'checkpoint_every = 10\nresume = "{checkpoint_of(site, {}).name}"')
    _, answer = plan(site.write(text.replace("lr = 1e-4", f"lr = 1e-4\n{optimizer}")), capsys=capsys)
    found = [one["message"] for one in answer["problems"] if one["key"] == "optimizer.schedule"]
    assert [("update 7 with" in one, "at update 7: nothing" in one) for one in found] == [(True, True)] * is_told


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("critic", [{}, {"num_layers": 2, "num_updates": 7}], ids=["without", "with"])
def test_a_run_with_a_critic_resumes_from_a_checkpoint_with_one(
    site: Site, capsys: pytest.CaptureFixture[str], critic: dict[str, Any], enabled: bool
) -> None:
    folder = checkpoint_of(site, critic)
    text = RUN.replace('kind = "grpo"', 'kind = "ppo"')
    text = text.replace("checkpoint_every = 10", f'checkpoint_every = 10\nresume = "{folder.name}"')
    text += "[critic]\nenabled = true\n" if enabled else ""
    _, answer = plan(site.write(text), capsys=capsys)
    errors = [one for one in answer["problems"] if one["severity"] == "error"]
    assert [one["key"] for one in errors] == ([] if bool(critic) == enabled else ["critic.enabled"]), errors
    for error in errors:
        assert f"has {'a' if critic else 'no'} critic" in error["message"]
        assert f"enabled = {str(enabled).lower()}" in error["message"]
