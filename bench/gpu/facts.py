"""What this machine is: GPUs, driver, versions, what can be imported, and the ceilings that MFU is read against.

python facts.py [--device cpu]
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from figures import Report, number, parser

NEEDED = (
    *("aiohttp", "jinja2", "msgspec", "numpy", "orjson", "psutil", "pydantic", "zmq", "rich"),
    *("safetensors", "tokenizers", "uvloop", "torch"),
)
FOR_PARTS = ("sglang", "megatron.core", "transformers", "triton", "transformer_engine", "torch_memory_saver", "pytest")
VERSIONS = ("torch", "sglang", "sglang-kernel", "megatron-core", "transformers", "triton", "flashinfer-python", "pyzmq")
MATRIX = 8192
COPY_BYTES = 4 << 30


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def gpus() -> list[str]:
    """Lines of nvidia-smi: name, memory, driver; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,memory.total,memory.used,driver_version,clocks.max.sm"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def ceilings() -> dict[str, float]:
    """bf16 matrix rate in TFLOP/s and device-to-device copy in GB/s (read and written bytes), on random data."""
    import torch

    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def seconds(num: int, work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / num

    return {
        "bf16_tflops": 2 * MATRIX**3 / seconds(20, lambda: torch.mm(a, b, out=c)) / 1e12,
        "copy_gb_s": 2 * COPY_BYTES / seconds(10, lambda: target.copy_(source)) / 1e9,
        "peer_copy_gb_s": peer_copy(source, seconds),
    }


def peer_copy(source: Any, seconds: Callable[[int, Callable[[], object]], float]) -> float:
    """From GPU 0 to GPU 1, GB/s; 0 with one GPU."""
    import torch

    if torch.cuda.device_count() < 2:
        return 0.0
    target = torch.empty_like(source, device="cuda:1")
    return COPY_BYTES / seconds(5, lambda: target.copy_(source)) / 1e9


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report("facts", is_dry=args.device == "cpu")
    seen = gpus()
    rows = [("GPU", line) for line in seen] or [("GPU", "none")]
    rows += [
        ("host", f"{os.cpu_count()} CPUs, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        ("system", f"{platform.platform()}, Python {platform.python_version()}"),
        *((name, version(name)) for name in VERSIONS),
    ]
    missing = [name for name in NEEDED if not is_there(name)]
    rows.append(("needed and not here", ", ".join(missing) or "nothing"))
    rows.append(("parts can use", ", ".join(n for n in FOR_PARTS if is_there(n)) or "nothing"))
    rows.append(("parts lack", ", ".join(n for n in FOR_PARTS if not is_there(n)) or "nothing"))
    rows += [
        (name, os.environ.get(name, "")) for name in ("CUDA_VISIBLE_DEVICES", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    ]
    report.table("The machine", ("what", "seen"), rows)
    report.keep("rows", rows)
    if missing:
        report.failed(f"myxa cannot run without {', '.join(missing)}")
    if args.device == "cuda":
        if not seen:
            report.missing("no GPU is seen by nvidia-smi")
        found = ceilings()
        report.keep("ceilings", found)
        report.table(
            "Ceilings on random data",
            ("bf16 matrix product, TFLOP/s", "copy on the GPU, GB/s", "copy to the next GPU, GB/s"),
            [tuple(number(value) if value else "-" for value in found.values())],
        )
    report.end()


if __name__ == "__main__":
    main()
