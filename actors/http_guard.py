"""Who may ask one of our HTTP doors for something: heads of requests in, a refusal or nothing out. Pure.

A door listens on the loopback address, which every program and web page of this machine can reach. Without a key it
serves programs and no page: a request must name this machine as its host, must not be sent by another site, nor be of a
type that pages may send without asking first. With a key, a request must carry it, and its host may have any name.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
PAGE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a page may send to another site without a preflight."""
ELSEWHERE = "another site asked for this"


@dataclass(frozen=True, slots=True)
class Head:
    """What is judged of a request."""

    method: str
    host: str
    origin: str = ""
    fetch_site: str = ""
    fetch_mode: str = ""
    content_type: str = ""
    authorization: str = ""

    @classmethod
    def of(cls, method: str, headers: Mapping[str, str]) -> Head:
        """`headers`: looked up by any spelling of their names."""
        return cls(
            method=method,
            host=headers.get("Host", ""),
            origin=headers.get("Origin", ""),
            fetch_site=headers.get("Sec-Fetch-Site", ""),
            fetch_mode=headers.get("Sec-Fetch-Mode", ""),
            content_type=headers.get("Content-Type", ""),
            authorization=headers.get("Authorization", ""),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP status and what to do."""

    status: int
    text: str


class HttpAccess:
    """Judges the requests of programs."""

    def __init__(self, key: str = "", *, host: str = "") -> None:
        """`key`: must come as bearer; empty: none. `host`: a further name of this machine."""
        self._key = key
        self._hosts = HOSTS | {host.lower(), f"[{host.lower()}]"} - {"", "[]"}

    def refusal(self, head: Head) -> Refusal | None:
        """Why this request is not served; None: it is."""
        if self._key:
            kind, _, key = head.authorization.partition(" ")
            if kind.lower() == "bearer" and same(key.strip(), self._key):
                return None
            return Refusal(401, "Unauthorized: send the key as Authorization: Bearer <key>")
        if refused := elsewhere(head, self._hosts):
            return refused
        content_type = head.content_type.partition(";")[0].strip().lower()
        if content_type.startswith(PAGE_TYPES):
            return Refusal(415, f"send Content-Type: application/json, not {content_type}")
        return None


def elsewhere(head: Head, hosts: frozenset[str] = HOSTS, *, is_visit: bool = False) -> Refusal | None:
    """Why a request is another site's, or by a name another site may have. `is_visit`: a link followed to a page."""
    if host_name(head.host) not in hosts:
        return Refusal(421, "this host name is not mine: ask http://127.0.0.1 or http://localhost")
    if head.origin and not _is_own(head.origin, head.host):
        return Refusal(403, ELSEWHERE)
    if head.fetch_site not in ("", "none", "same-origin") and not is_visit:
        return Refusal(403, ELSEWHERE)
    return None


def same(left: str, right: str) -> bool:
    """Whether two secrets are equal; takes as long whichever character differs."""
    return hmac.compare_digest(left.encode("utf-8", "replace"), right.encode("utf-8", "replace"))


def host_name(host: str) -> str:
    """Without the port: behind a tunnel it is another one."""
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and port.isdecimal() and not name.endswith(":")
    return (name if has_port else host).lower()


def _is_own(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme == "http" and parts.netloc.lower() == host.lower()
