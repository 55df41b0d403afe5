"""Exit statuses of the run's processes: what they mean for another attempt, and words for them."""

from __future__ import annotations

import signal
from typing import Final

HOPELESS: Final[dict[int, str]] = {
    2: "its configuration is wrong",
    5: "its data or a user's function is wrong",
}
"""Exit status -> why another attempt would end the same way."""

BUDGET_SPENT: Final = 4
"""Exit status of a run that ends because a child may not be started again."""


def describe_status(status: int) -> str:
    """Words for a process's return code: negative is a signal, as in `subprocess`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
