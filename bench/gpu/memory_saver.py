"""torch-memory-saver as others use it, for comparison: pause and resume with a host copy, and plain copies beside.

A stage of memory_rates.py. It hooks in by torch's pluggable allocator (mode "torch"), so nothing has to be preloaded;
its copies are the same in both modes.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
from memory_device import bytes_at, fill, hashes, seconds_of, within
from memory_figures import GIB
from memory_raw import PlainCopies, synchronise
from memory_stages import leave

TENSOR_BYTES = GIB
"""One allocation."""
TAG = "bench"


def cycles(saver: Any, device: str, limit_s: float, most: int) -> dict[str, list[float]]:
    """Seconds of every pause and resume of the tag; all streams are idle."""
    found: dict[str, list[float]] = {"out": [], "in": []}
    for _ in within(limit_s, most, least=2):
        synchronise(device)
        found["out"].append(seconds_of(lambda: saver.pause(TAG)))
        found["in"].append(seconds_of(lambda: (saver.resume(TAG), synchronise(device))))
    return found


def make_saver() -> Any:
    """Its one object, in the mode that needs no preloading."""
    saver = importlib.import_module("torch_memory_saver").torch_memory_saver  # a package of GPU machines
    saver.hook_mode = "torch"
    return saver


def measure(options: argparse.Namespace) -> dict[str, Any]:
    saver = make_saver()
    plain = PlainCopies(options.device, options.plain_bytes)
    rates = {
        "out": plain.rate(options.plain_bytes, is_out=True), "in": plain.rate(options.plain_bytes, is_out=False),
    }  # fmt: skip
    each = min(TENSOR_BYTES, options.num_bytes)
    num = options.num_bytes // each
    with saver.region(tag=TAG, enable_cpu_backup=True):
        tensors = [torch.empty(each, dtype=torch.uint8, device=options.device) for _ in range(num)]
    views = [bytes_at(tensor.data_ptr(), each, options.device) for tensor in tensors]
    for seed, view in enumerate(views):
        fill(view, seed)
    before = [hashes(view) for view in views]
    found: dict[str, Any] = {"plain": rates, "num_bytes": num * each}
    for name, is_retained in (("default", False), ("retained", True)):
        saver.retain_cpu_backup = is_retained
        found[name] = cycles(saver, options.device, options.limit / 2, options.cycles)
    found["is_equal"] = [hashes(view) for view in views] == before
    return found


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--device", default="cuda")
    args.add_argument("--num-bytes", type=int, default=8 * GIB)
    args.add_argument("--plain-bytes", type=int, default=4 * GIB)
    args.add_argument("--cycles", type=int, default=20)
    args.add_argument("--limit", type=float, default=40.0, help="seconds of cycles, both ways together")
    leave(**measure(args.parse_args()))


if __name__ == "__main__":
    main()
