"""Who may ask the dashboard for what. Pure: headers in, a refusal or nothing out.

Host, origin and site are judged as at every door (`actors/http_guard.py`), and each request must show that it knows the
secret of the printed URL. What changes the run must carry the secret itself in a header: cookies are shared by all
ports of a host, and a cookie of ours only opens what shows.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ...actors.http_guard import Head, Refusal, elsewhere, same

TOKEN_HEADER = "X-Myxa-Token"
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Of every answer."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What is judged of a request."""

    method: str
    host: str
    query_token: str = ""
    cookie: str = ""
    header_token: str = ""
    origin: str = ""
    fetch_site: str = ""
    fetch_mode: str = ""


class DashboardGuard:
    """Judges requests by one secret."""

    def __init__(self, token: str = "", *, may_operate: bool = False) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.may_operate = may_operate
        self.cookie = hashlib.blake2b(b"view", key=self.token.encode()[:64], digest_size=32).hexdigest()
        """Opens what shows, and does not give the secret away."""

    def refusal(self, ask: PageRequest) -> Refusal | None:
        """Why this request is not served; None: it is."""
        is_visit = ask.method == "GET" and ask.fetch_mode == "navigate"
        head = Head(ask.method, ask.host, ask.origin, ask.fetch_site, ask.fetch_mode)
        if refused := elsewhere(head, is_visit=is_visit):
            return refused
        if ask.method in ("GET", "HEAD"):
            is_known = same(ask.query_token, self.token) or same(ask.cookie, self.cookie)
            return None if is_known else Refusal(401, "open the URL that was printed: it holds the secret")
        return self._refusal_to_operate(ask)

    def _refusal_to_operate(self, ask: PageRequest) -> Refusal | None:
        if not self.may_operate:
            return Refusal(403, "this dashboard only shows: start it with --operate to turn knobs here")
        if ask.method != "POST":
            return Refusal(405, "only POST changes anything")
        if not same(ask.header_token, self.token):
            return Refusal(401, "open the URL that was printed: it holds the secret")
        return None
