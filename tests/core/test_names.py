"""Names, mailboxes, and code found by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.core.errors import ConfigError
from myxa.core.ids import check_name
from myxa.launch.worker import load_callable


@given(st.text(max_size=200))
def test_a_name_is_taken_whole_or_refused(text):
    try:
        assert check_name(text) == text
    except ConfigError:
        return
    assert text[0].islower()
    assert "\n" not in text


def test_code_is_found_by_module_and_attribute():
    assert load_callable("json:JSONDecoder.decode", where="reward.fn").__name__ == "decode"
    assert load_callable("math:sqrt", where="reward.fn")(4) == 2


@pytest.mark.parametrize(("path", "message"), [
    ("json", "does not say where"), (":dumps", "does not say where"), ("json:", "does not say where"),
    ("no_such_module_x:f", "no module 'no_such_module_x'"), ("json.nothing:f", "no module 'json.nothing'"),
    ("json:nothing", "has no 'nothing'"), ("math:pi", "is a float"),
])  # fmt: skip
def test_code_that_is_not_there_is_named_with_the_setting(path, message):
    with pytest.raises(ConfigError, match=rf"reward\.fn: .*{message}"):
        load_callable(path, where="reward.fn")


def test_an_import_error_inside_the_module_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "broken_user_code.py").write_text("import no_such_dependency_y\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency_y"):
        load_callable("broken_user_code:f", where="reward.fn")
