"""Fault tests share their modules by name; a run of the whole lab is made once for all its cells."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "transport"))
