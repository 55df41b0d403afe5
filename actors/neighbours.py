"""Modules beside a user's file are found before those of the current folder.

A run's copy of a file has copies of what lies beside it, and the folder that the run was started in often has the
originals, which Python would find first. What is installed goes before both, so a file beside shadows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class Neighbours:
    """Finds them, for folders in the order in which they were named."""

    def __init__(self) -> None:
        self._folders: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `sys.meta_path` wants it; None for modules of packages, and where the usual way does not lead into the
        current folder."""
        if path is not None:
            return None
        near = PathFinder.find_spec(name, self._folders)
        if near is None or near.origin is None:  # a folder without __init__.py may hold anything
            return None
        usual = PathFinder.find_spec(name)
        return near if usual is None or _is_here(usual) else None

    def add(self, folder: str) -> None:
        """One more folder; modules that nobody else has are found in it too."""
        if folder not in self._folders:
            self._folders.append(folder)
        if self not in sys.meta_path:
            sys.meta_path.insert(_place_of_path_finder(), self)


def _is_here(spec: ModuleSpec) -> bool:
    if spec.origin is None:
        return True
    origin = Path(spec.origin)
    folder = origin.parent if spec.submodule_search_locations is None else origin.parent.parent
    return folder.resolve() == Path.cwd().resolve()


def _place_of_path_finder() -> int:
    places = [place for place, finder in enumerate(sys.meta_path) if finder is PathFinder]
    return places[0] if places else len(sys.meta_path)


NEIGHBOURS = Neighbours()
"""Of this process."""
