"""docs/migrating.md and the table of `myxa migrate`: what they say is called so here, is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from myxa.core.config import RunConfig
from myxa.core.config.peers import rows
from myxa.core.config.section import Section

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
SECTIONS = {field.alias or name: field.annotation for name, field in RunConfig.model_fields.items()}


def named_keys() -> set[str]:
    """`section.key` in the columns that tell of this project."""
    found: set[str] = set()
    for line in PAGE.read_text().splitlines():
        for cell in re.split(r"(?<!\\) \| ", line.strip("| "))[1:] if line.startswith("|") else ():
            for span in re.findall(r"`([^`]+)`", cell):
                key = re.match(r"([a-z]+)\.([a-z_0-9]+)", span)
                if key and key[1] in SECTIONS and not span.endswith("()"):
                    found.add(f"{key[1]}.{key[2]}")
    for peer in ("slime", "verl"):
        found |= {match[0] for row in rows(peer) if (match := re.match(r"[a-z]+\.[a-z_0-9]+(?=$|\.)", row.key))}
    return {key for key in found if key.split(".")[0] not in ("roles", "sglang")}


@pytest.mark.parametrize("key", sorted(named_keys()))
def test_the_key_is_there(key: str) -> None:
    section, _, name = key.partition(".")
    kind = SECTIONS[section]
    assert isinstance(kind, type), key
    assert issubclass(kind, Section), key
    assert name in kind.model_fields, key


def test_many_keys_are_looked_at() -> None:
    assert len(named_keys()) > 50
