"""Who may speak to a run from another host: a file with public keys and what each may do.

    # access  key                                       name
    operate   rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7  ada
    view      Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID  screen in the lab

The file is looked at again when it has changed: a key that was taken out is refused at its next request.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError
from ...transport.session.guard import Verdict
from ...transport.wire import is_public_key
from .verb import Access

MAX_KEYS = 1000


@dataclass(frozen=True, slots=True)
class Admission:
    """What a key may do, and whose it is."""

    access: Access
    name: str


class AllowList:
    """The file, as it is now. The gatekeeper asks it about keys."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self.on_change: Callable[[], None] | None = None
        self._path = path
        self._stamp = (0, 0)
        self._admitted: dict[str, Admission] = {}
        self._read()

    def verdict(self, key: str, now: float) -> Verdict:
        """For a connection."""
        del now
        return Verdict.ADMIT if self.admission(key) is not None else Verdict.UNKNOWN

    def admission(self, key: str) -> Admission | None:
        """For a request; None: not (any more)."""
        try:
            self._read()
        except ConfigError:
            return None  # a file that is being written, or is broken now, admits nobody
        return self._admitted.get(key)

    def _read(self) -> None:
        try:
            facts = self._path.stat()
            stamp = (facts.st_mtime_ns, facts.st_ino)
            if stamp == self._stamp:
                return
            if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"control.allow_file: others may write {self._path}", remedy=f"chmod go-w {self._path}"
                )
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"control.allow_file: {self._path} cannot be read: {error}", remedy="name a file"
            ) from None
        self._admitted = parse_allow_list(text, str(self._path))
        self._stamp = stamp


def parse_allow_list(text: str, where: str) -> dict[str, Admission]:
    """Key -> admission. Raises ConfigError naming the line."""
    admitted: dict[str, Admission] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split(maxsplit=2)
        if not words or words[0] == "#":
            continue
        access, key = words[0], words[1] if len(words) > 1 else ""
        if access not in ("operate", "view") or not is_public_key(key):
            raise ConfigError(
                f"{where}:{number}: is no line of an allow-list", remedy='write "operate KEY NAME" or "view KEY NAME"'
            )
        if key in admitted:
            raise ConfigError(f"{where}:{number}: that key is there already", remedy="a key has one line")
        admitted[key] = Admission("operate" if access == "operate" else "view", words[2] if len(words) > 2 else key[:8])
    if len(admitted) > MAX_KEYS:
        raise ConfigError(f"{where}: {len(admitted)} keys", remedy=f"at most {MAX_KEYS}")
    return admitted
