"""Names of actors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from myxa.core.errors import ConfigError
from myxa.core.ids import check_name


@given(st.text(max_size=200))
def test_a_name_is_taken_whole_or_refused(text):
    try:
        assert check_name(text) == text
    except ConfigError:
        return
    assert text[0].islower()
    assert "\n" not in text
