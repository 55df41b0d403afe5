"""Who may ask the dashboard for what: every rule by itself, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from myxa.launch.web.dashboard import DashboardGuard, PageRequest

TOKEN = "a-secret-of-some-length"
VIEW = DashboardGuard(TOKEN)
OPERATE = DashboardGuard(TOKEN, may_operate=True)
LOOK = PageRequest(method="GET", host="127.0.0.1:4000", query_token=TOKEN)
TURN = PageRequest(
    method="POST", host="127.0.0.1:4000", header_token=TOKEN, origin="http://127.0.0.1:4000", fetch_site="same-origin"
)


def status(guard: DashboardGuard, ask: PageRequest) -> int:
    refusal = guard.refusal(ask)
    return 200 if refusal is None else refusal.status


def test_the_secret_opens_what_shows_as_query_or_by_its_cookie() -> None:
    assert status(VIEW, LOOK) == 200
    assert status(VIEW, replace(LOOK, query_token="", cookie=VIEW.cookie)) == 200
    assert status(VIEW, replace(LOOK, query_token="")) == 401
    assert status(VIEW, replace(LOOK, query_token=TOKEN[:-1])) == 401
    assert status(VIEW, replace(LOOK, query_token="", cookie=TOKEN)) == 401, "the cookie is not the secret"
    assert status(VIEW, replace(LOOK, query_token="\udcff")) == 401


OURS = ("127.0.0.1:4000", "localhost:9", "LOCALHOST", "[::1]:80", "[::1]", "127.0.0.1")
OTHERS = ("", "evil.example", "evil.example:4000", "127.0.0.1.evil.example", "0.0.0.0:4000", "::1", "localhost:x", "localhost:80:80")  # fmt: skip


def test_names_of_this_machine_are_served_and_no_others_even_with_the_secret() -> None:
    assert {host for host in OURS if status(VIEW, replace(LOOK, host=host)) != 200} == set()
    assert {host for host in OTHERS if status(VIEW, replace(LOOK, host=host)) != 421} == set()


@pytest.mark.parametrize(
    ("site", "mode", "origin", "code"),
    [
        ("cross-site", "cors", "", 403),
        ("same-site", "no-cors", "", 403),  # another port is another site
        ("", "", "http://evil.example", 403),
        ("", "", "http://127.0.0.1:4001", 403),
        ("cross-site", "navigate", "", 200),  # a link may be followed
    ],
)
def test_other_sites_are_not_served(site: str, mode: str, origin: str, code: int) -> None:
    assert status(VIEW, replace(LOOK, fetch_site=site, fetch_mode=mode, origin=origin)) == code
    assert status(OPERATE, replace(TURN, fetch_site="cross-site", fetch_mode="navigate")) == 403


def test_knobs_are_turned_only_where_that_was_wished_and_with_the_secret_itself() -> None:
    assert status(OPERATE, TURN) == 200
    assert status(VIEW, TURN) == 403
    assert status(OPERATE, replace(TURN, header_token="", query_token=TOKEN)) == 401
    assert status(OPERATE, replace(TURN, header_token=OPERATE.cookie, cookie=OPERATE.cookie)) == 401
    assert status(OPERATE, replace(TURN, origin="null")) == 403
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        assert status(OPERATE, replace(TURN, method=method)) == 405


def test_each_dashboard_has_its_own_secret() -> None:
    assert len({DashboardGuard().token for _ in range(5)}) == 5
    assert len(DashboardGuard().token) >= 40
