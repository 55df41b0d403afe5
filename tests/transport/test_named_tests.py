"""Pages that name tests and counters: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECURITY = (TESTS.parent / "docs" / "security.md").read_text()
PEERS = (TESTS.parent / "bench" / "peers" / "README.md").read_text()


def test_every_feature_beside_other_systems_names_a_test() -> None:
    table = PEERS.partition("\n## Beside other actor systems\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    assert [row[0] for row in rows if row[-2] != "no" and not re.search(r"`[\w/]+\.py", row[-1])] == []


def test_every_test_that_a_page_names_exists() -> None:
    links = re.findall(r"`((?:\w+/)*\w+\.py)(?:::(\w+))?`", SECURITY + PEERS)
    named = [(file, name) for file, name in links if (TESTS / file).exists() or name]
    assert len(named) > 40
    for file, name in named:
        assert not name or f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


def test_every_counter_of_a_refusal_is_on_the_page() -> None:
    sources = "".join((TESTS.parent / "transport" / f"{n}.py").read_text() for n in ("session/session", "zeromq"))
    counted = set(re.findall(r"""counters\["(\w+)"\] \+= 1""", sources))
    counted |= set(re.findall(r"\"((?:key|handshake)_\w+)\"[:,]", sources))
    missing = {name for name in counted if f"`{name}`" not in SECURITY} - {"lost", "pong", "cannot_answer"}
    assert not missing, f"docs/security.md does not tell of {sorted(missing)}"
