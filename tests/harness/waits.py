"""Other time-outs for a test: `monkeypatch.setattr(module, "TIMEOUTS", waits(wire={"unreachable_s": 0.5}))`."""

from __future__ import annotations

from dataclasses import replace

from myxa.core.timeouts import TIMEOUTS, Timeouts


def waits(**roles: dict[str, float]) -> Timeouts:
    """The product's, but for these of these roles."""
    changed = {role: replace(getattr(TIMEOUTS, role), **values) for role, values in roles.items()}
    return replace(TIMEOUTS, **changed)
