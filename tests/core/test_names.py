"""Names, mailboxes, and code found by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.core.actor import Mailbox, MailboxPolicy
from myxa.core.errors import ConfigError, Overloaded
from myxa.core.ids import check_name
from myxa.core.import_path import load_callable


@given(st.text(max_size=200))
def test_a_name_is_taken_whole_or_refused(text):
    try:
        assert check_name(text) == text
    except ConfigError:
        return
    assert text[0].islower()
    assert "\n" not in text


def test_a_mailbox_is_bounded_but_takes_events():
    box: Mailbox[str] = Mailbox("buffer", MailboxPolicy(size=2, retry_after_s=0.3))
    for text in ("a", "b"):
        box.admit()
        box.put(text)
    with pytest.raises(Overloaded, match=r"buffer: mailbox is full \(2 messages\)") as full:
        box.admit()
    assert full.value.retry_after_s == 0.3
    box.put("event")
    assert [box.take(), box.take(), box.take(), box.take()] == ["a", "b", "event", None]
    assert box.num_held == 2  # taken is not done
    box.release()
    box.admit()
    assert box.num_refused == 1
    with pytest.raises(ValueError, match="room for one"):
        MailboxPolicy(size=0)


def test_a_waiting_message_can_be_taken_out():
    box: Mailbox[list[int]] = Mailbox("x", MailboxPolicy())
    first, second = [1], [1]
    for item in (first, second):
        box.admit()
        box.put(item)
    assert box.remove(second)
    assert not box.remove(second)
    assert box.clear() == [first]
    assert len(box) == 0


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
