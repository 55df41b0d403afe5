"""What a run file may say of environments, and what is found before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.core.config import load_config
from myxa.core.errors import ConfigError
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.node import environments

BASE = (
    '[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n[rollout]\nworkflow = "environment"\n[reward]\nfn = "workflow"\n'
)
MAZE = '[environments.maze]\nkind = "gym"\nid = "maze.py:Maze"\n'
PUZZLES = '[environments.puzzles]\nkind = "reasoning_gym"\nid = "sudoku"\n'


def loaded(folder: Path, text: str, *more: str) -> Any:
    (folder / "run.toml").write_text(text)
    return load_config([folder / "run.toml"], more)


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (BASE, (), r"environments.*needs.*\[environments.NAME\]"),
        (
            BASE + MAZE,
            ("rollout.workflow=single_turn", 'reward.fn="exact"'),
            'rollout.workflow.*needs rollout.workflow = "environment"',
        ),
        (BASE + MAZE.replace("kind", "kidn"), (), 'did you mean "kind"'),
        (BASE + MAZE.replace('"gym"', '"gim"'), (), "environments.maze.kind"),
        (BASE + MAZE + "step_s = 0", (), "step_s"),
        (BASE + MAZE.replace("maze]", '"ma ze"]'), (), "letters, digits"),
        (BASE + '[environments.a]\nkind = "mcp"\n', (), "must name servers"),
        (BASE + '[environments.a]\nkind = "openenv"\nid = "host:80"\n', (), "address of a server"),
        (BASE + '[environments.a]\nkind = "verifiers"\n', (), 'kind = "verifiers" needs id'),
        (BASE + PUZZLES, ('data.train="environment:puzzels"',), "did you mean puzzles"),
        (BASE + MAZE, ('data.train="environment:maze"',), "no rows of its own"),
        (BASE + PUZZLES, ('data.train="environment:puzzles"', 'data.preset="plain"'), 'must be "slime"'),
    ],
)
def test_mistakes(tmp_path: Path, text: str, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, text, *more)


def test_paths_are_those_of_the_run_file(tmp_path: Path) -> None:
    text = BASE + MAZE + 'python = "venv/bin/python"\n' + PUZZLES
    config = loaded(tmp_path, text.replace('"d.jsonl"', '["d.jsonl", "environment:puzzles@[:9]"]'))
    assert config.environments["maze"].id == f"{tmp_path}/maze.py:Maze"
    assert config.environments["maze"].python == f"{tmp_path}/venv/bin/python"
    assert config.data.train == (f"{tmp_path}/d.jsonl", "environment:puzzles@[:9]")


def test_interpreters_are_looked_at_before_a_run(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    gone = (
        BASE
        + MAZE.replace("[environments.maze]", "[environments.bare]")
        + f'python = "{bare}"\n'
        + MAZE
        + 'python = "gone/bin/python"\n'
        + PUZZLES.replace("reasoning_gym", "openenv").replace('"sudoku"', '"http://h:1"')
    )
    config = loaded(tmp_path, gone)
    run = CheckedRun(config, [ActorSpec(name="rollout/0", role="rollout", index=0, node=0, kind="embedded")])
    found = {one.key: one.error.message for one in environments(run)}
    assert "cannot import myxa" in found["environments.bare.python"]
    assert "cannot be run" in found["environments.maze.python"]
    assert f'{sys.executable} has no module "openenv"' in found["environments.puzzles.python"]
