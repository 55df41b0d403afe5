"""Who may ask the dashboard for what. Pure: headers in, a refusal or nothing out.

The dashboard listens on the loopback address, which every program and every web page of this machine can reach. So each
request must show that it knows the secret of the printed URL, must name this machine as its host (a page whose name was
rebound to 127.0.0.1 does not), and must not be sent by another site. What changes the run must, on top, carry the
secret itself in a header: cookies are shared by all ports of a host, and a cookie of ours only opens what shows.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

TOKEN_HEADER = "X-Myxa-Token"
HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
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
class Ask:
    """What is judged of a request."""

    method: str
    host: str
    query_token: str = ""
    cookie: str = ""
    header_token: str = ""
    origin: str = ""
    fetch_site: str = ""
    fetch_mode: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP status and what to do."""

    status: int
    text: str


class Guard:
    """Judges requests by one secret."""

    def __init__(self, token: str = "", *, may_operate: bool = False) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.may_operate = may_operate
        self.cookie = hashlib.blake2b(b"view", key=self.token.encode()[:64], digest_size=32).hexdigest()
        """Opens what shows, and does not give the secret away."""

    def refusal(self, ask: Ask) -> Refusal | None:
        """Why this request is not served; None: it is."""
        if _host_name(ask.host) not in HOSTS:
            return Refusal(421, "this host name is not mine: open http://127.0.0.1 or http://localhost")
        if ask.origin and not _is_own(ask.origin, ask.host):
            return Refusal(403, "another site asked for this")
        is_visit = ask.method == "GET" and ask.fetch_mode == "navigate"
        if ask.fetch_site not in ("", "none", "same-origin") and not is_visit:
            return Refusal(403, "another site asked for this")
        if ask.method in ("GET", "HEAD"):
            is_known = _same(ask.query_token, self.token) or _same(ask.cookie, self.cookie)
            return None if is_known else Refusal(401, "open the URL that was printed: it holds the secret")
        return self._refusal_to_operate(ask)

    def _refusal_to_operate(self, ask: Ask) -> Refusal | None:
        if not self.may_operate:
            return Refusal(403, "this dashboard only shows: start it with --operate to turn knobs here")
        if ask.method != "POST":
            return Refusal(405, "only POST changes anything")
        if not _same(ask.header_token, self.token):
            return Refusal(401, "open the URL that was printed: it holds the secret")
        return None


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _host_name(host: str) -> str:
    """Without the port: behind a tunnel it is another one."""
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and port.isdecimal() and not name.endswith(":")
    return (name if has_port else host).lower()


def _is_own(origin: str, host: str) -> bool:
    parts = urlsplit(origin)
    return parts.scheme == "http" and parts.netloc.lower() == host.lower()
