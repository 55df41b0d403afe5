"""docs/embedding.md: its programs run and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
FILES: dict[str, str] = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
_OUTPUT = r"```python\n# (\w+\.py)\n(?:.(?!```))*?.```\n\n```text\n(.*?)```"
SAID: dict[str, str] = dict(re.findall(_OUTPUT, PAGE, re.DOTALL))


def test_every_program_has_its_output():
    assert set(FILES) == {"judge.py", "on_a_loop.py", "in_a_thread.py", "by_hand.py"}
    assert set(SAID) == set(FILES) - {"judge.py"}


@pytest.mark.parametrize("name", sorted(SAID))
def test_a_program_of_the_page(name: str, tmp_path: Path):
    for file, code in FILES.items():
        (tmp_path / file).write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", name],
        capture_output=True, text=True, check=False, timeout=50, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, SAID[name]), done.stderr
    assert [line for line in done.stderr.splitlines() if "Executing <" not in line] == []
