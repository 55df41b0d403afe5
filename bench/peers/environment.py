"""The peers' own environment: made once beside the repository's files, with pinned versions, never mixed with ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".bench-venv"
PINS = {"ray": "ray==2.60.0", "xoscar": "xoscar==0.12.2", "trl": "trl==1.16.0"}
WITH = {"trl": ["torch==2.13.0"]}


def python_with(peers: list[str]) -> str:
    """The interpreter of an environment in which all of `peers` are installed."""
    python = FOLDER / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    missing = [PINS[peer] for peer in peers if not _has(python, PINS[peer])]
    if missing:
        beside = [pin for peer in peers for pin in WITH.get(peer, ())]
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *missing, *beside]
        subprocess.run(install, check=True)
    return str(python)


def _has(python: Path, pin: str) -> bool:
    name, _, version = pin.partition("==")
    program = f"from importlib.metadata import version; assert version({name!r}) == {version!r}"
    return subprocess.run([str(python), "-c", program], capture_output=True, check=False).returncode == 0
