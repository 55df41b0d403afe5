"""Megatron's layouts against HuggingFace, on real GPUs: the cases of `tests/backends/test_megatron_model.py`, by NCCL.

    python layouts.py [--ranks 2|4] [--device cpu]

For every case: the folder is loaded into the layout, every exported tensor is compared with the folder bit by bit, and
one step's loss and gradients with those of transformers (float32, no TF32). One process a GPU goes through all cases.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from figures import Report, number, parser, work_folder
from servers import free_port
from train_speed import wait_for

TESTS = Path(__file__).resolve().parents[2] / "tests" / "backends"


def cases_module() -> ModuleType:
    """The tests' own cases, folders and bounds."""
    path = TESTS / "test_megatron_model.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(num_ranks: int, spec: dict[str, Any], out: Path, device: str, limit_s: float) -> str:
    """All ranks through all cases; empty, or why they did not get to the end."""
    place = out / "spec.json"
    place.write_text(json.dumps(spec))
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    processes: list[subprocess.Popen[bytes]] = []
    logs = [out / f"rank{rank}.log" for rank in range(num_ranks)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-W", "ignore", str(TESTS / "megatron_rank.py"), str(place), str(rank)]
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        statuses = wait_for(processes, limit_s)
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
    first = next((rank for rank, status in enumerate(statuses) if status != 0), None)
    if first is None:
        return ""
    text = logs[first].read_text(encoding="utf-8", errors="replace")[-1500:]
    return f"rank {first} ended with {statuses[first]}:\n{text}"


def read_results(out: Path, case: int, num_ranks: int) -> list[dict[str, Any]]:
    paths = [out / f"case{case}.rank{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def measure(options: argparse.Namespace) -> None:
    report = Report(f"layouts{options.ranks}", is_dry=options.device == "cpu")
    try:
        cases = cases_module()
    except ImportError as error:
        report.missing(str(error))
    out = work_folder() / f"layouts{options.ranks}"
    out.mkdir(parents=True, exist_ok=True)
    chosen = cases.LAYOUTS[options.ranks][: options.first or None]
    folders = {name: cases.make_folder(out, name) for name in sorted({model for model, _ in chosen})}
    spec = {
        "num_ranks": options.ranks,
        "port": free_port(),
        "out": str(out),
        "device": options.device,
        "cases": [
            {"name": cases.name_of(model, layout), "folder": str(folders[model]), "layout": layout,
             "num_sequences": cases.NUM_SEQUENCES}
            for model, layout in chosen
        ],
    }  # fmt: skip
    started_s = time.monotonic()
    trouble = run_ranks(options.ranks, spec, out, options.device, options.limit)
    report.say(f"- {len(chosen)} cases in {time.monotonic() - started_s:.0f} s")
    rows: list[tuple[str, ...]] = []
    num_equal = 0
    for index, case in enumerate(spec["cases"]):
        results = read_results(out, index, options.ranks)
        if len(results) < options.ranks:
            rows.append((case["name"], "-", "-", "-", "did not end"))
            continue
        loss, gradient = (max(result[key] for result in results) for key in ("loss", "gradient"))
        is_equal = loss < cases.MAX_LOSS_ERROR and 0 < gradient < cases.MAX_GRADIENT_ERROR
        num_equal += is_equal
        took_s = max(result["took_s"] for result in results)
        rows.append(
            (case["name"], number(loss), number(gradient), number(took_s), "equal" if is_equal else "DIFFERENT")
        )
    head = ("layout", "loss, relative error", "gradients, largest relative error", "s", "")
    report.table(f"{options.ranks} ranks; weights in and out equal to the bit where a line has figures", head, rows)
    report.keep("rows", rows)
    report.goal(f"layouts equal to HuggingFace, of {len(chosen)}", float(num_equal), at_least=float(len(chosen)))
    if trouble:
        report.failed(trouble)
    report.end()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2)
    args.add_argument("--first", type=int, default=0, help="only so many cases; 0 = all")
    args.add_argument("--limit", type=float, default=240.0)
    measure(args.parse_args())


if __name__ == "__main__":
    main()
