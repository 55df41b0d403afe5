"""The line of every key, for any layout that TOML allows; and "did you mean": slips are recognised, nonsense is not."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.core.config import AlgoConfig
from myxa.core.config.loading import key_lines, toml_value
from myxa.core.config.run import RolloutSettings
from myxa.core.suggestion import nearest, suggest

TEXT = '''# comment
top = 1
[a]   # header
b.c = """
[not.a.header]
x = 1
"""
list = [
  1,  # [z]
  2,
]
inline = { deep = { er = 1 }, k = "]" }

["quoted.name"]
'also "this"' = 3
[[many]]
x = 1
[[many]]
x = 2
[a.sub]
d = '[x]'
'''


def test_every_form_of_key() -> None:
    assert key_lines(TEXT, tomllib.loads(TEXT)) == {
        ("top",): 2, ("a",): 3, ("a", "b"): 4, ("a", "b", "c"): 4, ("a", "list"): 8, ("a", "inline"): 12,
        ("quoted.name",): 14, ("quoted.name", 'also "this"'): 15, ("many",): 16, ("a", "sub"): 20, ("a", "sub", "d"): 21,
    }  # fmt: skip


keys = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
leaves = st.one_of(st.integers(-9, 9), st.booleans(), keys, st.lists(st.integers(0, 9), max_size=3), st.just("a\nb"))


@settings(max_examples=40)
@given(st.dictionaries(keys, st.dictionaries(keys, leaves, max_size=4), max_size=4))
def test_lines_of_generated_files(tables: dict[str, dict[str, Any]]) -> None:
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    for name, table in tables.items():
        lines.append(f"[{toml_value(name)}]")
        expected[(name,)] = len(lines)
        for key, value in table.items():
            lines.extend(["", f"{toml_value(key)} = {toml_value(value)}"])
            expected[(name, key)] = len(lines)
    text = "\n".join(lines)
    assert tomllib.loads(text) == tables
    assert key_lines(text, tables) == expected


NAMES = sorted({*AlgoConfig.model_fields, *RolloutSettings.model_fields})


@given(st.sampled_from([name for name in NAMES if len(name) >= 5]), st.data())
def test_one_slip_is_still_near_some_name(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    slip = data.draw(st.sampled_from(["drop", "double", "swap", "upper"]))
    if slip == "drop":
        typed = name[:at] + name[at + 1 :]
    elif slip == "double":
        typed = name[:at] + name[at] + name[at:]
    elif slip == "swap":
        typed = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    else:
        typed = name.upper()
    found = nearest(typed, NAMES)
    assert found is not None
    if slip in ("double", "upper"):
        assert found == name


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=8), max_size=20))
def test_any_text_gets_an_answer(name: str, known: list[str]) -> None:
    text = suggest(name, known)
    assert text.startswith(("did you mean ", "known: ", "none is known"))


def test_few_names_are_listed_and_of_many_the_first() -> None:
    assert '"prompt"' in suggest("Prompt", ["prompt", "label"])
    assert suggest("zzz", ["prompt", "label"]).endswith("label, prompt")
    many = suggest("zzz", [f"k{i:02}" for i in range(14)])
    assert "k11" in many and "k12" not in many and "2 more" in many
