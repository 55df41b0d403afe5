"""Did you mean: typing slips are recognised, nonsense is not guessed at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from myxa.core.config import AlgoConfig, RolloutSettings
from myxa.core.suggestion import nearest, suggest

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
