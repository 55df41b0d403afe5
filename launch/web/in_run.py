"""The dashboard of a run inside its own launcher, if the run file wishes for one. It only shows.

Knows the note of the control sockets. It asks the run through the read-only socket, as `myxa dashboard` does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from ..control.client import ControlNote

URL_FILE = "dashboard.url"
"""In the run directory, for its owner's eyes only: the URL holds the secret."""


@contextlib.asynccontextmanager
async def run_dashboard(note: ControlNote, port: int) -> AsyncGenerator[str]:
    """While this lasts, the dashboard is served; gives its URL, empty for `port` -1: none. Raises ConfigError if the
    port is taken."""
    if port < 0:
        yield ""
        return
    from ..tui.feed import Feed
    from .dashboard import Dashboard  # aiohttp is needed here only
    from .guard import DashboardGuard

    path = Path(note.run_dir) / URL_FILE
    async with Dashboard(Feed.of_note(note, only_view=True), DashboardGuard()).serving(port) as url:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # a leftover may have been made with other rights
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{url}\n")
        try:
            yield url
        finally:
            path.unlink(missing_ok=True)
