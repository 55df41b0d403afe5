"""Tests of live knobs share their modules by name."""

from __future__ import annotations
