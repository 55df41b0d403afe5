"""docs/config.md is what the section classes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.config import RunConfig
from myxa.core.config.loading import json_schema, render_reference
from myxa.core.config.section import keys_of, section_of, walk

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
REMEDY = (
    "update it: python -c \"from myxa.core.config.loading import render_reference as r; open('docs/config.md', 'w')"
    '.write(r())"'
)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render_reference(), REMEDY


def test_every_key_is_described_and_listed() -> None:
    page = PAGE.read_text()
    for path, field in walk(RunConfig):
        about = field.description or getattr(section_of(field), "__doc__", "")
        assert about, f"{'.'.join(path)} has no docstring"
        if path[0] != "roles" and len(path) == 2:
            assert f"* `{path[1]}` (" in page, path


@pytest.mark.parametrize("row", ["* `lr` (number, above 0; `0.0001`): ", "* `path` (path; **required**): "])
def test_ranges_and_defaults_are_shown(row: str) -> None:
    assert row in PAGE.read_text()


def test_the_schema_for_editors_has_every_key_with_its_meaning_and_unit() -> None:
    schema = json_schema()
    assert list(schema["properties"]) == list(keys_of(RunConfig))
    for key, field in keys_of(RunConfig).items():
        section = section_of(field)
        for name, info in keys_of(section).items() if section else ():
            row = schema["$defs"][section.__name__ if section else ""]["properties"][name]
            assert "$ref" in row or row["description"] == info.description, f"{key}.{name}"
    rows = schema["$defs"]["RolloutSettings"]["properties"]
    assert (rows["timeout_s"]["x-unit"], rows["num_samples"]["minimum"]) == ("seconds", 1)
    assert schema["$defs"]["DataSettings"]["additionalProperties"] is False
