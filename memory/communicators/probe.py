"""Which ways of releasing communicators this process has, and which of them is taken.

    keep -> suspend (torch's, or NCCL's own calls) -> reload -> rebuild

"auto" takes reload, else suspend; rebuild changes identities and is only taken
when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from ...core.errors import ConfigError, MemoryFault
from .proxy_build import missing_for_build
from .residency import ResidencyKind
from .suspend import NEEDED_VERSION, NcclLibrary

Setting = Literal["auto", "keep", "suspend", "reload", "rebuild"]
Way = Literal["", "native", "ctypes", "proxy"]
AUTO: tuple[ResidencyKind, ...] = ("reload", "suspend")
"""Reload first: runs on GPUs ended well with it; with suspend (NCCL 2.30.7) a run hung (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One way, and why it can or cannot be taken here."""

    kind: ResidencyKind
    way: Way
    is_available: bool
    reason: str


def probe(environment: Mapping[str, str] | None = None) -> tuple[Rung, ...]:
    """All rungs, lowest first. `environment`: where NCCL_CUMEM_ENABLE would be set; without it NCCL's default counts.

    Loads nothing and starts nothing; asks before any process group exists.
    """
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    is_mapped = (environment or {}).get("NCCL_CUMEM_ENABLE", "") != "0"
    native, direct = _native(has_nccl, is_mapped), _direct(has_nccl, is_mapped)
    lacking = missing_for_build()
    return (
        Rung(
            "keep",
            "",
            True,
            "communicators stay on the device" if has_nccl else "no NCCL here: gloo holds no device memory",
        ),
        Rung("suspend", "native", not native, native or "torch's Backend.suspend"),
        Rung("suspend", "ctypes", not direct, direct or "NCCL's own calls, in the library that is loaded"),
        Rung("reload", "proxy", not lacking, lacking or "a proxy backend drops and builds what is inside each group"),
        Rung("rebuild", "", True, "the owner destroys and makes its groups; identities change"),
    )


def choose(
    setting: Setting, rungs: tuple[Rung, ...] | None = None, environment: Mapping[str, str] | None = None
) -> Rung:
    """The rung to take; ConfigError when `setting` cannot be had here, with the reason of each way to it."""
    known = probe(environment) if rungs is None else rungs
    by_kind = {kind: [rung for rung in known if rung.kind == kind] for kind in ("keep", "suspend", "reload", "rebuild")}
    if setting == "auto":
        if not (dist.is_nccl_available() and torch.cuda.is_available()) and rungs is None:
            return by_kind["keep"][0]
        wanted = [rung for kind in AUTO for rung in by_kind[kind]]
        return next((rung for rung in wanted if rung.is_available), by_kind["keep"][0])
    if setting not in by_kind:
        raise ConfigError(f"there is no way '{setting}' to release communicators", remedy=f"auto, {', '.join(by_kind)}")
    found = next((rung for rung in by_kind[setting] if rung.is_available), None)
    if found is None:
        reasons = "; ".join(f"{rung.way or rung.kind}: {rung.reason}" for rung in by_kind[setting])
        others = ", ".join(dict.fromkeys(rung.kind for rung in known if rung.is_available))
        raise ConfigError(
            f"communicators cannot be released by '{setting}' here: {reasons}", remedy=f"auto, or {others}"
        )
    return found


def _native(has_nccl: bool, is_mapped: bool) -> str:
    """Why not; empty: it can be taken."""
    if not has_nccl:
        return "no NCCL here"
    backend: Any = cast(Any, torch)._C._distributed_c10d.Backend
    if not hasattr(backend, "suspend"):
        return f"torch {torch.__version__} has no Backend.suspend (2.12 has)"
    version = tuple(cast(Any, torch.cuda).nccl.version())
    if version[:3] < NEEDED_VERSION:
        return f"NCCL {'.'.join(map(str, version))} has no suspend ({'.'.join(map(str, NEEDED_VERSION))} has)"
    return "" if is_mapped else "NCCL_CUMEM_ENABLE=0: nothing of a communicator can be unmapped"


def _direct(has_nccl: bool, is_mapped: bool) -> str:
    if not has_nccl:
        return "no NCCL here"
    if not hasattr(cast(Any, dist).ProcessGroupNCCL, "_comm_ptr"):
        return f"torch {torch.__version__} does not show its communicators (_comm_ptr)"
    try:
        NcclLibrary()
    except MemoryFault as error:
        return str(error)
    return "" if is_mapped else "NCCL_CUMEM_ENABLE=0: nothing of a communicator can be unmapped"
