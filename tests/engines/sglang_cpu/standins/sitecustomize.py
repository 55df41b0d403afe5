"""Lets a stock SGLang be imported where the compiled packages it names have no build for CPUs.

Python runs this file at its start when the folder is on PYTHONPATH, in the server and in all its children. Each
package in ABSENT that is not installed is answered with a module whose names exist and can be stored, subclassed or
asked for an attribute, and which raise as soon as anything is called: a code path that needs a kernel fails loudly
instead of computing something else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

ABSENT = frozenset({"sgl_kernel", "torchvision"})
"""Top-level packages of compiled GPU code."""
VERSION = "0.0.0+absent"


class AbsentPackageCalledError(RuntimeError):
    """A path of the server needs a package that this machine cannot have."""


class AbsentName:
    """Anything a package in ABSENT is asked for; good for an import, not for a call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> AbsentName:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return AbsentName(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise AbsentPackageCalledError(f"{self._name} was called, but its package is not installed here")

    def __repr__(self) -> str:
        return f"<absent {self._name}>"


class AbsentModule(types.ModuleType):
    """A module, or any module inside it."""

    __version__ = VERSION
    __path__ = []

    def __getattr__(self, attribute: str) -> AbsentName:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return AbsentName(f"{self.__name__}.{attribute}")


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: an installed package is always preferred."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class OnTheHost(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """NIXL is told that caches are memory of the host, which they are here; SGLang 0.5.17 says device memory."""

    name = "sglang.srt.disaggregation.nixl.conn"
    found: importlib.machinery.ModuleSpec | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        self.found = importlib.machinery.PathFinder.find_spec(fullname, path)
        return self.found and importlib.machinery.ModuleSpec(fullname, self, origin=self.found.origin)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: types.ModuleType) -> None:
        assert self.found is not None and isinstance(self.found.loader, importlib.machinery.SourceFileLoader)
        source = self.found.loader.get_source(self.name) or ""
        for kinds, instead in (
            ('("VRAM", "DRAM")', '("DRAM",)'),
            ('"VRAM": [], ', ""),
            ('"VRAM"', '"DRAM"'),
            ("[str(kind) for kind in kinds]", '["DRAM" for kind in kinds]'),
        ):
            source = source.replace(kinds, instead)
        exec(compile(source, self.found.origin or self.name, "exec"), module.__dict__)


sys.meta_path.append(AbsentFinder())
sys.meta_path.insert(0, OnTheHost())
