"""A browser to take pictures with: where it is, and what keeps it quiet."""

from __future__ import annotations

import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """Path of the first that is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)
