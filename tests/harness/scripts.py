"""Python files outside the package, as modules: benches and examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def loaded(path: Path | str) -> ModuleType:
    """`path`: from the repository's root."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # its records look themselves up there
    spec.loader.exec_module(module)
    return module
