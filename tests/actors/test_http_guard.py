"""Who is served at an HTTP door: programs of this machine, or whoever has the key; never a page of another site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from myxa.actors.http_guard import Head, HttpAccess

KEY = "a-key-of-some-length"
CURL = Head("POST", "127.0.0.1:30000", content_type="application/json")
REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"host": "evil.example:30000"}, 421), ({"host": "127.0.0.1.evil.example"}, 421), ({"host": "0.0.0.0:1"}, 421),
    ({"host": "127.0.0.7:1"}, 421), ({"origin": "http://evil.example"}, 403), ({"origin": "http://127.0.0.1:1"}, 403),
    ({"origin": "null"}, 403), ({"origin": "http://[::1"}, 403),
    ({"fetch_site": "cross-site", "fetch_mode": "no-cors"}, 403), ({"fetch_site": "same-site"}, 403),
    ({"content_type": "text/plain;charset=UTF-8"}, 415), ({"content_type": "application/x-www-form-urlencoded"}, 415),
    ({"content_type": "Multipart/Form-Data; boundary=x"}, 415),
]  # fmt: skip
SERVED: list[dict[str, Any]] = [
    {}, {"content_type": ""}, {"host": "localhost"}, {"host": "[::1]:9"}, {"authorization": "Bearer of-an-sdk"},
    {"content_type": "application/json; charset=utf-8"},
    {"origin": "http://127.0.0.1:30000", "fetch_site": "same-origin"},
]  # fmt: skip


def test_pages_of_other_sites_are_refused_and_programs_of_this_machine_are_served() -> None:
    door = HttpAccess()
    for changes, status in REFUSED:
        refusal = door.refusal(replace(CURL, **changes))
        assert refusal is not None and refusal.status == status and refusal.text, changes
    for changes in SERVED:
        assert door.refusal(replace(CURL, **changes)) is None, changes
    assert HttpAccess(host="127.0.0.7").refusal(replace(CURL, host="127.0.0.7:1")) is None


@pytest.mark.parametrize(
    "sent", ["", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xff"]
)
def test_where_there_is_a_key_it_must_be_sent_and_any_host_may_be_named(sent: str) -> None:
    door = HttpAccess(KEY)
    refusal = door.refusal(replace(CURL, authorization=sent))
    assert refusal is not None and refusal.status == 401 and "Authorization: Bearer" in refusal.text
    far = replace(CURL, host="engine-3.cluster:30000")
    assert door.refusal(replace(far, authorization=f"Bearer {KEY}")) is None
