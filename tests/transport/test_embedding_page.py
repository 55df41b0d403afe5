"""The programs of examples/nodes run and print what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

FOLDER = Path(__file__).parents[2] / "examples" / "nodes"


def said(program: Path) -> str:
    """What its docstring says that it prints."""
    about = ast.get_docstring(ast.parse(program.read_text()), clean=True) or ""
    return textwrap.dedent(about.partition("It prints\n\n")[2]).rstrip("\n") + "\n"


def test_every_way_has_a_program() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {"judge.py", "on_a_loop.py", "in_a_thread.py"}


@pytest.mark.parametrize("name", ["on_a_loop.py", "in_a_thread.py"])
def test_a_program(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", name],
        capture_output=True, text=True, check=False, timeout=50, cwd=FOLDER,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, said(FOLDER / name)), done.stderr
    assert [line for line in done.stderr.splitlines() if "Executing <" not in line] == []
