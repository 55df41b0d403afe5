"""config.toml and origin.json of a run directory, or what the newest copy in a checkpoint says of a torn one.

A file that a person edited is not torn: what is wrong with it is told, and nothing else is taken for it. Knows files;
must not know how a run is started.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from ...actors.checkpoints.folder import version_in
from ...actors.checkpoints.run_part import MAX_START_BYTES, StartCopy, read_start_copy
from ...core.files import read_regular

CHECKPOINTS = "checkpoints"
CONFIG = "config.toml"
ORIGIN = "origin.json"


class _Told(msgspec.Struct):
    """Of origin.json: how new it is."""

    lives: list[dict[str, object]] = []


def newest_copy(run_dir: Path) -> tuple[StartCopy, Path] | None:
    """The copy of the latest life, in its newest checkpoint, and that checkpoint; None: there is none."""
    found: list[tuple[tuple[int, int], StartCopy, Path]] = []
    for path in (run_dir / CHECKPOINTS).glob("*/"):
        copy = read_start_copy(path)
        if copy is not None and (lives := _num_lives(copy)) >= 0:
            found.append(((lives, version_in(path)), copy, path))
    if not found:
        return None
    _, copy, path = max(found, key=lambda each: each[0])
    return copy, path


def _num_lives(copy: StartCopy) -> int:
    try:
        return len(msgspec.json.decode(copy.origin, type=_Told).lives)
    except msgspec.MsgspecError:
        return -1


def config_of(run_dir: Path) -> tuple[str | None, str]:
    """(text of config.toml as the newest copy has it, why), or (None, ""): the file itself is to be read."""
    newest = newest_copy(run_dir)
    if newest is None:
        return None, ""
    copy, place = newest
    trouble = _trouble(run_dir / CONFIG, copy.config)
    return (copy.config, f"{run_dir / CONFIG} {trouble}: its copy in {place.name} is taken") if trouble else (None, "")


def config_text(run_dir: Path) -> str:
    """Of config.toml, or of its copy. Raises OSError if there is neither."""
    text, _ = config_of(run_dir)
    return (run_dir / CONFIG).read_text(encoding="utf-8-sig") if text is None else text


def _trouble(path: Path, whole: str) -> str:
    try:
        text = read_regular(path, MAX_START_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        return "is missing"
    except UnicodeDecodeError:
        return "is no text"
    except OSError as error:
        return f"cannot be read ({error})"
    if "\0" in text:
        return "is no text"
    if text.strip() != whole.strip() and whole.startswith(text.rstrip()):
        return "is cut off" if text.strip() else "is empty"
    return "" if _is_toml(text) or _is_edited(text, whole) else "is no TOML"


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _is_edited(text: str, whole: str) -> bool:
    """Most of its lines are still there: somebody made a mistake in it."""
    lines = set(whole.splitlines())
    return len(lines & set(text.splitlines())) * 2 > len(lines)
