"""A user's function is found by name, or the message says which part of the name is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.user_code.functions import GROUP_FILTER, REWARD, WORKFLOW, Expected, load_function
from myxa.core.errors import ConfigError, MyxaError, UserCodeError

SIGNATURE = "def reward(completion: Completion) -> float | dict[str, float]"
CODE = """
import neighbour

LIMIT = 3

def score(completion): return neighbour.value()
async def judge(completion, *, strictness=1.0): return strictness
def two(completion, other): return 0.0
class Judge:
    async def __call__(self, completion): return 1.0
    @staticmethod
    def score(completion): return 2.0

judge_object = Judge()

async def generate(ctx, prompt): return None
def generate_now(ctx, prompt): return None
def keep(group): return True
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "neighbour.py").write_text("def value():\n    return 0.25\n")
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_a_function_in_a_file_with_a_neighbour(file: Path) -> None:
    found = load_function(f"{file}:score", REWARD)
    assert (found.fn(None), found.is_async, found.name) == (0.25, False, f"{file}:score")
    assert load_function(f"{file}:score", REWARD).fn is found.fn


@pytest.mark.parametrize(("attr", "expected", "is_async"), [
    ("judge", REWARD, True), ("judge_object", REWARD, True), ("Judge.score", REWARD, False),
    ("generate", WORKFLOW, True), ("generate_now", WORKFLOW, False), ("keep", GROUP_FILTER, False),
])  # fmt: skip
def test_every_kind_of_callable(file: Path, attr: str, expected: Expected, is_async: bool) -> None:
    assert load_function(f"{file}:{attr}", expected).is_async is is_async


def test_a_function_in_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    assert load_function("neighbour:value", Expected("x", 0, "def value()")).fn() == 0.25


def refused(name: str, expected: Expected = REWARD, args: dict[str, Any] | None = None) -> MyxaError:
    with pytest.raises(MyxaError) as caught:
        load_function(name, expected, args)
    return caught.value


def test_what_is_not_there_or_no_function_is_named(file: Path, tmp_path: Path) -> None:
    for name, says in (
        ("no_such_module.inner:f", 'reward.fn: there is no module "no_such_module" -- install it, or name the file'),
        ("json.nothing:f", 'reward.fn: there is no module "json.nothing"'),
        (f"{tmp_path}/no.py:f", f"reward.fn: there is no file {tmp_path}/no.py -- check the path before the colon"),
        (f"{file}:scroe", f'reward.fn: {file} has no "scroe" -- did you mean "score"?'),
        (f"{file}:LIMIT", f"reward.fn: {file}:LIMIT is of type int, not a function -- it must look like: {SIGNATURE}"),
        *(
            (name, f'reward.fn = "{name}" is not a function name -- write module:function')
            for name in ("score", ":f", "m:")
        ),
    ):
        error = refused(name)
        assert isinstance(error, ConfigError)
        assert str(error).startswith(says)


def test_a_signature_that_does_not_fit(file: Path) -> None:
    error = refused(f"{file}:two")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"reward.fn = \"{file}:two\" has the signature (completion, other): missing a required argument: 'other' -- "
        f"it must look like: {SIGNATURE}, called with 1 value and what reward.args holds: nothing"
    )
    error = refused(f"{file}:judge", args={"strictness": 2.0, "other": 1})
    assert "got an unexpected keyword argument 'other'" in str(error)
    assert str(error).endswith("called with 1 value and what reward.args holds: strictness, other")
    assert "called with 2 values" in str(refused(f"{file}:score", WORKFLOW))


@pytest.mark.parametrize(("code", "cause"), [
    ("x = 1\nraise ValueError('boom')\n", "ValueError: boom ({file}:2)"),
    (  # as it may quote an answer of the model: on one line, nothing for a terminal to obey, and the place behind it
        "raise ValueError('one\\n two \\x1b[31m' + 'x' * 600)\n",
        f"ValueError: one two [31m{'x' * 488} ... ({{file}}:1)",
    ),
    ("import no_such_dependency\n", "ModuleNotFoundError: No module named 'no_such_dependency' ({file}:1)"),
    ("def f(:\n", "SyntaxError: invalid syntax ({file}:1)"),
])  # fmt: skip
def test_code_that_raises_when_it_is_imported(tmp_path: Path, code: str, cause: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code)
    for _ in range(2):  # a half-imported module is not kept
        error = refused(f"{file}:f")
        assert isinstance(error, UserCodeError)
        assert str(error).startswith(f"reward.fn: importing {file} raised {cause.format(file=file)} -- mend it")


def test_a_missing_dependency_is_not_blamed_on_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = refused("needs_more:f")
    assert isinstance(error, UserCodeError)
    assert "importing needs_more raised ModuleNotFoundError: No module named 'no_such_dependency'" in str(error)
