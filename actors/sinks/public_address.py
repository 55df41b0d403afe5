"""Addresses as events and logs may show them: without user, password and query, which may hold secrets.

`urllib.parse` alone is not enough: it takes an unescaped `/`, `?` or `#` in a
password for the end of the host, so that what it calls the host may be half a secret.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

HIDDEN = "..."
MIN_SECRET = 4
"""Characters; what is shorter would be found in every other word."""


def public_address(address: str) -> str:
    """`https://user:password@host:5000/path?token=x` -> `https://host:5000/path`. Where it is not sure what is secret,
    nothing but the scheme is left. A path of a file has no secrets and stays as it is."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return f"{scheme}://{HIDDEN}"
    if rest.count("@") > 1 or rest.count("@") != parts.netloc.count("@"):
        return f"{scheme}://{HIDDEN}"
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def public_errors(address: str) -> Generator[None]:
    """Errors raised inside that quote `address`, or what `public_address` leaves out of it, quote its public form.
    Raises OSError in the place of such an error; others pass as they are."""
    try:
        yield
    except Exception as error:
        text = str(error)
        public = _without(text, address)
        if public == text:
            raise
        # its cause is left out as well: it is logged with the same secrets
        raise OSError(f"{type(error).__name__}: {public}") from None


def _without(text: str, address: str) -> str:
    shown = public_address(address)
    if shown == address:
        return text
    text = text.replace(address, shown)
    for secret in sorted(_secrets(address), key=len, reverse=True):
        text = text.replace(secret, HIDDEN) if len(secret) >= MIN_SECRET else text
    return text


def _secrets(address: str) -> set[str]:
    """Whole and in parts, as libraries quote them."""
    user, _, place = address.partition("://")[2].rpartition("@")
    query = place.partition("?")[2].partition("#")[0]
    values = {pair.partition("=")[2] for pair in query.split("&")}
    return {user, user.partition(":")[2], query, place.partition("#")[2], *values}
