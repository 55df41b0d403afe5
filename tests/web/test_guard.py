"""Who may ask the dashboard for what: every rule by itself, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from myxa.launch.web.dashboard import DashboardGuard, PageRequest, cookie_of

GUARD = DashboardGuard()
LOOK = PageRequest(method="GET", host="127.0.0.1:4000", query_token=GUARD.view)
TURN = PageRequest(
    method="POST", host="127.0.0.1:4000", header_token=GUARD.operate, origin="http://127.0.0.1:4000",
    fetch_site="same-origin",
)  # fmt: skip


def status(ask: PageRequest) -> int:
    refusal = GUARD.refusal(ask)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(("secret", "may_operate"), [(GUARD.view, False), (GUARD.operate, True)])
def test_a_secret_opens_what_shows_as_query_or_by_its_cookie(secret: str, may_operate: bool) -> None:
    by_cookie = replace(LOOK, query_token="", cookie=cookie_of(secret))
    for ask in (replace(LOOK, query_token=secret), by_cookie):
        assert (status(ask), GUARD.may_operate(ask)) == (200, may_operate)
    assert status(replace(LOOK, query_token="")) == 401
    assert status(replace(LOOK, query_token=secret[:-1])) == 401
    assert status(replace(LOOK, query_token="", cookie=secret)) == 401, "the cookie is not the secret"
    assert status(replace(LOOK, query_token="\udcff")) == 401


OURS = ("127.0.0.1:4000", "localhost:9", "LOCALHOST", "[::1]:80", "[::1]", "127.0.0.1")
OTHERS = ("", "evil.example", "evil.example:4000", "127.0.0.1.evil.example", "0.0.0.0:4000", "::1", "localhost:x", "localhost:80:80")  # fmt: skip


def test_names_of_this_machine_are_served_and_no_others_even_with_the_secret() -> None:
    assert {host for host in OURS if status(replace(LOOK, host=host)) != 200} == set()
    assert {host for host in OTHERS if status(replace(LOOK, host=host)) != 421} == set()


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
    assert status(replace(LOOK, fetch_site=site, fetch_mode=mode, origin=origin)) == code
    assert status(replace(TURN, fetch_site="cross-site", fetch_mode="navigate")) == 403


def test_the_run_is_changed_only_with_the_secret_for_it_itself() -> None:
    assert status(TURN) == 200
    assert status(replace(TURN, header_token=GUARD.view)) == 403
    assert status(replace(TURN, header_token="", query_token=GUARD.operate)) == 401
    assert status(replace(TURN, header_token=cookie_of(GUARD.operate), cookie=cookie_of(GUARD.operate))) == 401
    assert status(replace(TURN, origin="null")) == 403
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        assert status(replace(TURN, method=method)) == 405


def test_each_dashboard_has_its_own_secrets() -> None:
    guards = [DashboardGuard() for _ in range(5)]
    secrets = {secret for guard in guards for secret in (guard.view, guard.operate)}
    assert len(secrets) == 10
    assert min(map(len, secrets)) >= 40
