"""docs/security.md links each claim to its test: the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists():
    links = re.findall(r"`((?:\w+/)*\w+\.py)(?:::(\w+))?`", PAGE)
    named = [(file, name) for file, name in links if (TESTS / file).exists() or name]
    assert len(named) > 25
    for file, name in named:
        assert not name or f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


def test_every_counter_of_a_refusal_is_on_the_page():
    sources = "".join((TESTS.parent / "transport" / f"{n}.py").read_text() for n in ("session/session", "zeromq"))
    counted = set(re.findall(r"""counters\["(\w+)"\] \+= 1""", sources))
    counted |= set(re.findall(r"\"((?:key|handshake)_\w+)\":", sources))
    missing = {name for name in counted if f"`{name}`" not in PAGE} - {"lost", "pong", "cannot_answer"}
    assert not missing, f"docs/security.md does not tell of {sorted(missing)}"
