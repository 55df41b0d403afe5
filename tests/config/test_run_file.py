"""A run file that is right: defaults, merging, overrides, paths, sections derived for SFT."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from myxa.core.config import AlgoConfig, RunConfig, dump_config, load_config
from myxa.core.config.data import DataSettings
from myxa.core.config.run import ModelSettings, parse_devices
from myxa.core.errors import ConfigError

MINIMAL = '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_minimal_file_gets_every_default(folder: Path) -> None:
    config = load_config(write(folder, MINIMAL))
    assert config.algo.kind == "grpo"
    assert config.asynchrony.max_staleness == 2
    assert config.rollout.num_samples == 8
    assert config.optimizer.betas == (0.9, 0.95)
    assert [name for name, _ in config.roles.by_name()] == [
        "coordinator", "buffer", "monitor", "memory", "gateway", "trainer", "rollout",
    ]  # fmt: skip
    assert config.roles["trainer"] is config.roles.trainer
    assert config.roles.rollout.device_ids == ()


def test_relative_paths_in_a_file_are_relative_to_its_folder(folder: Path) -> None:
    text = """
[run]
dir = "out"
[model]
path = "../model"
[data]
train = ["a.jsonl@[10:20]", "/abs/b.jsonl"]
[eval]
data = "sub/../held.jsonl"
[reward]
fn = "rewards.py:score"
[rollout]
workflow = "pkg.flows:generate"
[trainer]
resume = "ckpt"
[roles.rollout]
python = "venv/bin/python"
[roles.trainer]
python = "python3.12"
"""
    config = load_config(write(folder, text, "nested/run.toml"))
    base = str(folder / "nested")
    assert config.run.dir == f"{base}/out"
    assert config.model.path == f"{folder}/model"
    assert config.data.train == (f"{base}/a.jsonl@[10:20]", "/abs/b.jsonl")
    assert config.eval.data == f"{base}/held.jsonl"
    assert config.reward.fn == f"{base}/rewards.py:score"
    assert config.rollout.workflow == "pkg.flows:generate"
    assert config.trainer.resume == f"{base}/ckpt"
    assert config.roles.rollout.python == f"{base}/venv/bin/python"
    assert config.roles.trainer.python == "python3.12"


def test_the_home_of_nobody_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "~no-such-user/m"\n[data]\ntrain = "~/t.jsonl"\n')
    config = load_config(file)
    assert (config.model.path, config.data.train) == (str(tmp_path / "~no-such-user" / "m"), "/home/me/t.jsonl")


@pytest.mark.parametrize(
    "key", ["model.path", "algo.ref_path", "run.dir", "data.train", "eval.data", "reward.fn", "roles.trainer.python"]
)
def test_a_name_that_the_system_cannot_take_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n')
    with pytest.raises(ConfigError, match=rf"{key}.*NUL"):
        load_config(file, [rf'{key}="a\u0000b"'])


def test_paths_in_flags_and_the_default_run_dir_are_relative_to_the_current_folder(folder: Path) -> None:
    config = load_config(write(folder, MINIMAL), ["model.path=./here/model", "trainer.resume=~/ckpt", "run.dir="])
    assert config.model.path == f"{folder}/elsewhere/here/model"
    assert config.run.dir == f"{folder}/elsewhere/runs"
    assert config.trainer.resume == str(Path("~/ckpt").expanduser())


def test_files_are_merged_key_by_key_and_flags_win(folder: Path) -> None:
    base = write(folder, MINIMAL + "[optimizer]\nlr = 0.1\neps = 1e-6\n[rollout]\nstop_token_ids = [1, 2]\n")
    over = write(
        folder, '[optimizer]\nlr = 0.2\n[rollout]\nstop_token_ids = [3]\n[data]\ntrain = "b.jsonl"\n', "o/over.toml"
    )
    config = load_config([base, over], ["optimizer.eps=1e-5"])
    assert (config.optimizer.lr, config.optimizer.eps) == (0.2, 1e-5)
    assert config.rollout.stop_token_ids == (3,)
    assert config.data.train == f"{folder}/o/b.jsonl"
    assert config.model.path == f"{folder}/model"


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("roles.trainer.devices=0", ("roles", "trainer", "devices"), "0"),  # text: the shell takes quotes
        ("run.name=2026-11-25", ("run", "name"), "2026-11-25"),
        ("algo.batch_size=64", ("algo", "batch_size"), 64),
        ("run.name=sort-2", ("run", "name"), "sort-2"),
        ('run.name="sort"', ("run", "name"), "sort"),
        ("optimizer.lr = 3e-4", ("optimizer", "lr"), 3e-4),
        ("data.shuffle=false", ("data", "shuffle"), False),
        ("rollout.stop_token_ids=[1, 2]", ("rollout", "stop_token_ids"), (1, 2)),
        ("async.max_staleness=0", ("asynchrony", "max_staleness"), 0),
        ("data.system=a = b", ("data", "system"), "a = b"),
        ("roles.rollout.count=3", ("roles", "rollout", "count"), 3),
        ('roles.rollout.env."A"="x"', ("roles", "rollout", "env"), {"A": "x"}),
        ("roles.rollout.env.A=1", ("roles", "rollout", "env"), {"A": "1"}),
        ("roles.rollout.env.A=pa$$w0rd", ("roles", "rollout", "env"), {"A": "pa$$w0rd"}),
        ("data.system=[INST] you", ("data", "system"), "[INST] you"),
        ("reward.pattern=[0]", ("reward", "pattern"), "[0]"),
        ("reward.pattern=[0-9]+", ("reward", "pattern"), "[0-9]+"),
        ("roles.rollout.env.A=True", ("roles", "rollout", "env"), {"A": "True"}),
        ('reward.args.word="True"', ("reward", "args"), {"word": "True"}),
        ("data.system=\U0001f600 \u2028\x7f", ("data", "system"), "\U0001f600 \u2028\x7f"),
        ("reward.args.tolerance=0.5", ("reward", "args"), {"tolerance": 0.5}),
    ],
)
def test_flags_are_toml_values_and_bare_words_are_text(
    folder: Path, flag: str, path: tuple[str, ...], value: object
) -> None:
    actual: object = load_config(write(folder, MINIMAL), [flag])
    for name in path:
        actual = getattr(actual, name)
    assert actual == value


@pytest.mark.parametrize(("value", "table"), [("{}", {}), ("{ b = 2 }", {"b": 2})])
def test_d07_a_table_in_a_flag_replaces_the_table_of_the_file(folder: Path, value: str, table: dict[str, int]) -> None:
    path = write(folder, MINIMAL + "[data.chat_template_kwargs]\na = 1\n")
    flags = (f"data.chat_template_kwargs={value}",)
    assert load_config(path, flags).data.chat_template_kwargs == table
    assert load_config(path, (*flags, "data.chat_template_kwargs.c=3")).data.chat_template_kwargs == {
        **table,
        "c": 3,
    }


def test_sft_needs_no_rollout_section(folder: Path) -> None:
    config = load_config(write(folder, MINIMAL + 'preset = "chat"\n[algo]\nkind = "sft"\n'))
    assert config.rollout.workflow == "demonstration"
    assert config.rollout.num_samples == 1
    assert config.algo.group_filter == "none"


def test_a_configuration_made_in_python_is_checked_too() -> None:
    model, data = ModelSettings(path="m"), DataSettings(train="t.jsonl")
    assert RunConfig(model=model, data=data).algo.batch_size == 32
    with pytest.raises(ValidationError, match="minibatches: does not divide batch_size = 32"):
        AlgoConfig(minibatches=5)
    with pytest.raises(ValidationError, match=r"eval\.every: needs eval\.data"):
        RunConfig.model_validate({"model": model, "data": data, "eval": {"every": 2}})


@pytest.mark.parametrize(
    "extra",
    [
        "",
        'preset = "chat"\n[algo]\nkind = "sft"\n',
        'system = "say \\"hi\\"\\n\\u007f \\\\ é 🙂"\n[roles.rollout]\nnodes = "*"\nenv = {A = "x y", B_2 = ""}\n',
        (
            "[reward]\nfn = \"regex\"\npattern = '(\\d+)\\s*$'\n"
            "args = {deep = {x = [1, 2.5, true], y = []}, when = 2024-01-01T00:00:00Z}\n"
        ),
        '[roles.trainer]\ndevices = "0-3"\ncount = 4\nnodes = [0, 1]\n[async]\nmax_staleness = 0\npolicy = "drop"\n',
    ],
)
def test_a_dumped_configuration_loads_as_the_same(folder: Path, extra: str) -> None:
    config = load_config(write(folder, MINIMAL + extra))
    dumped = dump_config(config)
    again = load_config(write(folder, dumped, "elsewhere/deep/config.toml"))
    assert again == config
    assert dump_config(again) == dumped


def test_what_a_run_froze_still_loads(folder: Path) -> None:
    """What is refused today may have run yesterday."""
    first, title, rollout = dump_config(load_config(write(folder, MINIMAL))).partition("[roles.rollout]")
    first = first.replace(f'dir = "{folder}/elsewhere/runs"', 'dir = "/x/$USER"')
    frozen = first + title + rollout.replace("env = {}", 'env = {A = "$B"}')
    config = load_config(write(folder, frozen))
    assert (config.run.dir, config.roles.rollout.env) == ("/x/$USER", {"A": "$B"})
    assert dump_config(load_config(write(folder, dump_config(config)))) == dump_config(config)
    with pytest.raises(ConfigError, match="variable of the environment"):
        load_config(write(folder, frozen.partition("\n")[2]))


@pytest.mark.parametrize(
    ("text", "devices"), [("cpu", ()), ("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0,2, 5-6", (0, 2, 5, 6)), ("63", (63,))]
)
def test_devices(text: str, devices: tuple[int, ...]) -> None:
    assert parse_devices(text) == devices


def test_latest_means_the_run_that_it_pointed_at(tmp_path: Path) -> None:
    """`runs/latest` moves on as soon as the next run starts."""
    runs = tmp_path / "runs"
    for name in ("first", "second"):
        (runs / name / "checkpoints").mkdir(parents=True)
    link = runs / "latest"
    link.symlink_to("first")
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "latest"\n[data]\ntrain = "runs/latest/data.jsonl"\n'
        '[trainer]\nresume = "runs/latest/checkpoints"\n'
    )
    config = load_config([file], [])
    link.unlink()
    link.symlink_to("second")
    assert config.trainer.resume == str(runs.resolve() / "first" / "checkpoints")
    assert str(runs.resolve() / "first" / "data.jsonl") in str(config.data.train)
    assert config.model.path == str(tmp_path / "latest")


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.toml")), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_an_example_loads(file: Path) -> None:
    config = load_config([file], [])
    assert config.run.name
    assert config.roles.trainer.kind == "torch" or config.roles.trainer.device_ids
