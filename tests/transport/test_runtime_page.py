"""bench/peers/README.md: what its feature table claims is shown by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "bench" / "peers" / "README.md").read_text()


def test_every_feature_names_a_test_that_exists() -> None:
    table = PAGE.partition("\n## Beside other actor systems\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        ours, shown_by = row[-2], row[-1]
        found = re.search(r"`([\w/]+\.py)(?:::(\w+))?`", shown_by)
        assert found is not None or ours == "no", f"{row[0]}: claims {ours!r} and names no test"
        if found is not None:
            source = (TESTS / found[1]).read_text()
            assert not found[2] or f"def {found[2]}(" in source, f"{row[0]}: no test {found[0]}"
