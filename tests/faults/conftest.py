"""Fault tests share their modules by name; a run of the whole lab is made once for all its cells."""

from __future__ import annotations
