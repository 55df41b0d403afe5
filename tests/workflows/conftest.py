"""The tests' own modules are found by name."""

from __future__ import annotations
