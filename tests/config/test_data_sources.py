"""`[data.sources.NAME]`: what it inherits, how it is written back, and every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.config import dump_config, load_config
from myxa.core.errors import ConfigError

HEAD = '[model]\npath = "m"\n[data]\n'
MATH = '[data.sources.math]\npath = "a.jsonl"\n'


def load(folder: Path, text: str, *overrides: str) -> str:
    """What is wrong with it."""
    (folder / "run.toml").write_text(HEAD + text)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "run.toml", overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_source_says_what_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'{HEAD}preset = "plain"\nprompt_key = "q"\nlabel_key = "a"\nsystem = "s"\nmax_passes = 3\n{MATH}label_key = "b"\n'
        '[data.sources.talk-2]\npath = ["b.jsonl@[1:]", "/c.jsonl"]\nweight = 0\npreset = "chat"\nmax_passes = 0\n'
    )
    config = load_config(tmp_path / "run.toml", ['data.sources.math.system="t"'])
    parts = config.data.parts()
    math, talk = parts["math"], parts["talk-2"]
    assert (math.train, math.preset, math.prompt_key, math.label_key) == (f"{tmp_path}/a.jsonl", "plain", "q", "b")
    assert (math.system, math.max_passes) == ("t", 3)
    assert talk.train == (f"{tmp_path}/b.jsonl@[1:]", "/c.jsonl")
    assert (talk.preset, talk.prompt_key, talk.label_key, talk.system, talk.max_passes) == ("chat", "", "", "s", 0)
    assert [key for key, _ in config.data_files()] == ["data.sources.math.path", "data.sources.talk-2.path"]
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config


MISTAKES = [
    (f'train = "/x"\n{MATH}', "run.toml:4: data.train"),
    (f"{MATH}wieght = 1\n", "run.toml:6: data.sources.math.wieght"),
    ("[data.sources.math]\nweight = 1\n", "run.toml:4: data.sources.math.path"),
    (f"{MATH}weight = 0\n", "run.toml:6: data.sources.math.weight"),
    (f"{MATH}weight = -1\n", "run.toml:6: data.sources.math.weight"),
    (f"{MATH}weight = 1e-12\n", "run.toml:6: data.sources.math.weight"),
    (f"{MATH}weight = inf\n", "run.toml:6: data.sources.math.weight"),
    (f"{MATH}max_passes = -2\n", "run.toml:6: data.sources.math.max_passes"),
    ('[data.sources."a b"]\npath = "a"\n', 'run.toml:4: data.sources."a b"'),
    ('[data.sources."a.b"]\npath = "a"\n', 'run.toml:4: data.sources."a.b"'),
    ('[data.sources.math]\npath = "/a@[1"\n', "run.toml:5: data.sources.math.path"),
    (f'{MATH}preset = "chat"\nprompt_key = "q"\n', "run.toml:7: data.sources.math.prompt_key"),
    (f'{MATH}messages_key = "q"\n', "run.toml:6: data.sources.math.messages_key"),
    ("sources = 3\n", "run.toml:4: data.sources"),
    ("[data.sources]\n", "run.toml:3: data.train"),
    ("".join(f'[data.sources.s{n}]\npath = "a"\n' for n in range(65)), "data.sources"),
    ('train = "a"\ndifficulty_low = 0.5\n', "run.toml:5: data.difficulty_low"),
    (f'{MATH}[algo]\nkind = "sft"\n', "run.toml:4: data.sources.math.answer_key"),
]


@pytest.mark.parametrize(("text", "named"), MISTAKES)
def test_a_mistake_has_its_line_and_is_told_once(tmp_path: Path, text: str, named: str) -> None:
    message = load(tmp_path, text)
    assert named in message and "\n" not in message, message


def test_learning_from_demonstrations_has_no_difficulty(tmp_path: Path) -> None:
    text = 'train = "a"\npreset = "chat"\ndifficulty_low = 0.1\ndifficulty_high = 0.9\n[algo]\nkind = "sft"\n'
    assert "data.difficulty_high = 0.9: must be equal to data.difficulty_low" in load(tmp_path, text)
