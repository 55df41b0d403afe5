"""Weights from a trainer's device into a server: how long each phase takes, beside the bare broadcast of these bytes.

    python bench/weights.py                                   CPU: our own server in another process, over gloo
    python bench/weights.py --url http://127.0.0.1:30000 --folder DIR --device cuda:0 [--channel cuda_ipc]
                                                              GPU: a running SGLang server that serves DIR

Every update changes all weights (they are staged anew from the folder's tensors). Phases, in milliseconds:

    publish     tensors -> flat buckets on the sender's device, with their digest       training stands still
    prepare     plan told, group checked (built the first time)                         nothing stands still
    commit      pause, transfer, load, announce, check, go on                           generation stands still
    send        the broadcasts alone, as the sender sees them                           part of commit

The first update builds groups and allocates; it is told apart. Both ends of the bare broadcast stand ready in a group
of their own: what remains of `commit` beyond it is ours, the server's and HTTP's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, device_routes
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.torch_store import find_store
from myxa.actors.weights.channels.process_group import ChannelGroup
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.process import boot_id
from myxa.core.weight_channel import JoinRequest, SendOrder

SENDER = "trainer/0"
LIMIT_S = 120.0
ENGINE_SERVER = Path(__file__).parents[1] / "tests/harness/engine_server.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Senders:
    """One sender in this process, as an engine's route sees it; it notes how long sending took."""

    def __init__(self, sender: DeviceWeightSender) -> None:
        self._sender = sender
        self.send_s = 0.0

    async def ask(self, sender: str, order: Any) -> Any:
        started = time.monotonic()
        answer = await asyncio.to_thread(self._sender.answer, order)
        if isinstance(order, SendOrder):
            self.send_s = time.monotonic() - started
        return answer


def tensors_of(folder: Path, device: str) -> list[tuple[str, torch.Tensor]]:
    with open_weights(folder, read_config(folder)) as arrays:
        return [
            (
                name,
                torch.frombuffer(bytearray(a.data), dtype=getattr(torch, a.spec.dtype)).view(a.spec.shape).to(device),
            )
            for name, a in arrays.items()
        ]


@contextlib.contextmanager
def own_server(folder: Path) -> Iterator[str]:
    """The embedded engine behind SGLang's routes, in another process."""
    command = (sys.executable, str(ENGINE_SERVER), str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line[line.index("http://") :].split()[0]
        finally:
            process.kill()


async def updates(options: argparse.Namespace, folder: Path, url: str) -> tuple[list[dict[str, float]], int, int]:
    """Milliseconds per phase of every update, bytes and buckets of a version."""
    sender = DeviceWeightSender(SENDER, channel=options.channel, bucket_bytes=options.bucket_mb << 20, host=boot_id())
    senders = Senders(sender)
    config = read_config(folder)
    engine = SglangEngine(
        url,
        SglangOptions(vocab_size=config.vocab_size, context_length=config.context_length, name="bench"),
        device_routes(senders, DeviceRouteOptions(host=boot_id(), join_s=LIMIT_S, send_s=LIMIT_S)),
    )
    await engine.start()
    tensors = tensors_of(folder, options.device)
    rows: list[dict[str, float]] = []
    num_bytes = num_buckets = 0
    for version in range(1, options.updates + 2):
        started = time.perf_counter()
        manifest = sender.publish(version, lambda: iter(tensors))
        published = time.perf_counter()
        assert manifest is not None
        await engine.prepare_weights(manifest)
        prepared = time.perf_counter()
        await engine.commit_weights(version)
        committed = time.perf_counter()
        sender.release(version - 1)
        num_bytes, num_buckets = manifest.num_bytes, len(manifest.digest.split("."))
        rows.append(
            {
                "publish": (published - started) * 1e3,
                "prepare": (prepared - published) * 1e3,
                "commit": (committed - prepared) * 1e3,
                "send": senders.send_s * 1e3,
            }
        )
    await engine.close()
    sender.close()
    return rows, num_bytes, num_buckets


def bare(options: argparse.Namespace, folder: Path) -> list[float]:
    """Milliseconds of a broadcast of the same buckets to a process that does nothing else."""
    sender = DeviceWeightSender(SENDER, channel="nccl", bucket_bytes=options.bucket_mb << 20, host=boot_id())
    manifest = sender.publish(1, lambda: iter(tensors_of(folder, "cpu")))
    assert manifest is not None
    request = JoinRequest(
        channel="bare", engine="bare", num_ranks=1, engine_host="127.0.0.1", asker_host=boot_id(), timeout_s=LIMIT_S
    )
    offer = sender.answer(request)
    times = options.updates + 1
    command = [
        sys.executable,
        __file__,
        "--member",
        offer.address,
        str(offer.port),
        str(manifest.num_bytes),
        str(times),
    ]
    if len(manifest.digest.split(".")) > 1:
        raise SystemExit("the bare broadcast is of one bucket: raise --bucket-mb")
    with subprocess.Popen(command, env=ENVIRONMENT) as member:
        order = SendOrder(channel="bare", version=1, timeout_s=LIMIT_S)
        found: list[float] = []
        for _ in range(times):
            started = time.monotonic()
            sender.answer(order)
            found.append((time.monotonic() - started) * 1e3)
        member.wait(timeout=LIMIT_S)
    sender.close()
    return found[1:]


def member(address: str, port: str, num_bytes: str, times: str) -> None:
    import threading

    store = find_store(address, int(port), 2, LIMIT_S)
    group = ChannelGroup.join(store, "bare", 1, 2, torch.device("cpu"), LIMIT_S, address=address)
    flat = torch.empty(int(num_bytes), dtype=torch.uint8)
    for _ in range(int(times)):
        group.broadcast(flat, threading.Event(), LIMIT_S)


def told(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    worst = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{name:>10}  median {statistics.median(values):9.2f} ms   p99 {worst:9.2f} ms   least {ordered[0]:9.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="a running server; none: our own, in another process")
    parser.add_argument("--folder", type=Path, help="model folder that the server serves")
    parser.add_argument("--preset", default="20m", help="without --folder: size of a random model (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where the trainer's weights are (%(default)s)")
    parser.add_argument("--channel", choices=["nccl", "cuda_ipc"], default="nccl")
    parser.add_argument("--bucket-mb", type=int, default=2048)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(*options.member)
        return
    if options.device.startswith("cuda"):
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(place)
            make_tiny_model(folder, options.preset, seed=1)
        url = options.url or stack.enter_context(own_server(folder))
        rows, num_bytes, num_buckets = asyncio.run(updates(options, folder, url))
        print(f"{num_bytes / 1e6:.1f} MB in {num_buckets} bucket(s), {options.updates} updates, {options.channel}")
        print("     first  " + "  ".join(f"{name} {value:.1f} ms" for name, value in rows[0].items()))
        for name in rows[0]:
            print(told(name, [row[name] for row in rows[1:]]))
        print(told("end to end", [row["publish"] + row["prepare"] + row["commit"] for row in rows[1:]]))
        if options.device == "cpu" and num_buckets == 1:
            found = bare(options, folder)
            print(told("bare", found) + f"   {num_bytes / 1e6 / statistics.median(found):.2f} GB/s")


main()
