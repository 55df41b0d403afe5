"""New weights of the Qwen3-30B-A3B shape from a Megatron rank into an SGLang server on another GPU.

    python weights_experts.py [--channels nccl,cuda_ipc] [--updates 5] [--fp8]

The rank holds parameters only (random, bf16, 57 GiB), the server begins with dummy ones. An update is what a run does:
the rank exports and stages a version, the engine's client prepares and commits it. A client of its own reads one
endless stream of the server: the stall is the longest silence while a version was committed, minus the usual one.

Bytes: after each channel's last version the server's own checksum of all its weights is taken. The second channel
begins with other values, then sends those of the first: the checksums must differ, then be equal.

With --fp8 the server holds its projections as FP8 in blocks of 128 x 128 (as a folder of `myxa convert --dtype fp8`
has them), and the rank quantises them on the way. Peak: the device memory of an update beside parameters and staging.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Report, parser, work_folder
from make_model import MOE_30B, make_shaped
from servers import FP8_SERVER, Server, ServerDiedError, running
from weights_latency import checksum, probing, read_tokens

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, device_routes
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.actors.weights.channels.plan import joins_parameters
from myxa.actors.weights.channels.sender import DeviceWeightSender, Fp8Rule, SentChannel
from myxa.core.process import boot_id

SENDER = "trainer/0"
LINK_BYTES_S = 396e9
"""One GPU of an H200 host to another, as `memory_rates` measured it."""


class Senders:
    """The rank's sender, asked in a thread as a trainer's actor does it."""

    def __init__(self) -> None:
        self.now: DeviceWeightSender | None = None

    async def ask(self, sender: str, order: Any) -> Any:
        del sender
        assert self.now is not None
        return await asyncio.to_thread(self.now.answer, order)


FP8_CONFIG = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(MOE_30B["num_hidden_layers"]))],
}  # fmt: skip


def model_folder(folder: Path, *, is_dry: bool, is_fp8: bool) -> ModelConfig:
    if is_dry:
        return make_shaped(folder, "dry")
    folder.mkdir(parents=True, exist_ok=True)
    said = MOE_30B | ({"quantization_config": FP8_CONFIG} if is_fp8 else {})
    (folder / "config.json").write_text(json.dumps(said))
    return parse_model_config(MOE_30B, "Qwen3-30B-A3B")


def rule_of(config: ModelConfig) -> Fp8Rule:
    """For a server whose weights are dummies: which its folder would hold in FP8."""
    names = frozenset(name for name in config.tensor_shapes() if name.endswith("_proj.weight"))
    return Fp8Rule(names=names, block=(128, 128))


def made_rank(config: ModelConfig, device: torch.device) -> tuple[Any, list[Any], Callable[[], Any]]:
    """A gang of one with the model's parameters: its world, its chunks, and its export."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/backends"))
    importlib.import_module("megatron_on_cpu").install()  # nothing where there is a GPU
    from myxa.actors.backends.megatron.hf_weights import iter_hf_tensors
    from myxa.actors.backends.megatron.layout import ParallelLayout
    from myxa.actors.backends.megatron.provider import build_model_chunks
    from myxa.actors.backends.megatron.world import MegatronWorld
    from myxa.actors.backends.torch_backend.world import Gang

    world = MegatronWorld.enter(Gang(), device, ParallelLayout(), seed=0)
    chunks = build_model_chunks(config, ParallelLayout(), torch.bfloat16, {})
    return world, chunks, lambda: iter_hf_tensors(chunks, config)


async def update(
    sender: DeviceWeightSender, engine: SglangEngine, version: int, tensors: Any, device: torch.device
) -> dict[str, float]:
    """Seconds of its parts; when it was committed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.time()
    manifest = await asyncio.to_thread(sender.publish, version, tensors)
    assert manifest is not None
    published = time.time()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    await engine.prepare_weights(manifest)
    prepared = time.time()
    await engine.commit_weights(version)
    done = time.time()
    sender.release(version)
    return {
        "all_s": done - began, "publish_s": published - began, "prepare_s": prepared - published,
        "commit_s": done - prepared, "from_s": prepared, "until_s": done,
        "sent_bytes": manifest.num_bytes, "peak_bytes": peak,
    }  # fmt: skip


async def summed(report: Report, server: Server, device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {}
    try:
        return await asyncio.to_thread(checksum, server.url)
    except (OSError, KeyError, ValueError) as error:
        report.say(f"- no checksum: {type(error).__name__}: {error}")
        return {}


async def measure(
    report: Report, options: Any, server: Server, config: ModelConfig, chunks: list[Any], tensors: Callable[[], Any],
    work: Path,
) -> None:  # fmt: skip
    device = next(chunks[0].parameters()).device
    quantise = rule_of(config) if options.fp8 and device.type != "cpu" else None
    held_bytes = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    senders, sums = Senders(), dict[str, list[dict[str, str]]]()
    routes = device_routes(senders, DeviceRouteOptions(host=boot_id(), same_gpu=(SENDER,)))
    length = 512 if device.type == "cpu" else 1024
    engine = SglangEngine(server.url, SglangOptions(vocab_size=config.vocab_size, context_length=length), routes)
    await engine.start()
    version, sent_bytes = 0, 0.0

    def scale(factor: float) -> None:
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(factor)

    for channel in options.channels.split(","):
        kind: SentChannel = "nccl" if channel == "nccl" else "cuda_ipc"
        joins = kind == "cuda_ipc" and joins_parameters(config)
        sender = senders.now = DeviceWeightSender(
            SENDER, channel=kind, bucket_bytes=options.bucket_mb << 20, host=boot_id(), joins=joins,
            quantise=quantise,
        )  # fmt: skip
        found: list[dict[str, float]] = []
        sums[channel] = []
        scale(-1.0)
        notes = work / f"probe_{channel}.txt"
        with probing(server.url, notes, config.vocab_size, 200 if device.type == "cpu" else 900):
            await asyncio.sleep(2)
            for number in range(options.updates + 1):
                version += 1
                found.append(await update(sender, engine, version, tensors, device))
                if not number:
                    sums[channel].append(await summed(report, server, device))
                    scale(-1.0)
                await asyncio.sleep(1)
        sums[channel].append(await summed(report, server, device))
        sent_bytes = found[0]["sent_bytes"]
        sender.close()
        later = found[1:]
        tokens = read_tokens(notes)
        usual = statistics.median([t.gap_s for t in tokens if t.gap_s] or [0.0])
        stalls = [
            max((t.gap_s for t in tokens if one["from_s"] <= t.wall_s <= one["until_s"] + 0.2), default=0.0) - usual
            for one in later
        ]
        told = {
            name: statistics.median(one[name] for one in later)
            for name in ("all_s", "publish_s", "prepare_s", "commit_s")
        }
        stall = statistics.median(stalls)
        peak = max(one["peak_bytes"] for one in later) - held_bytes - sent_bytes
        report.table(
            f"{channel}: {config.num_parameters:,} parameters in {'FP8' if options.fp8 else 'bf16'}, "
            f"{options.updates} updates, seconds, median",
            ("end to end", "export and stage", "prepare", "commit", "stall (longest)", "first update", "GB sent",
             "peak beside, GiB"),
            [(*(f"{told[name]:.3f}" for name in told), f"{stall:.3f} ({max(stalls):.3f})", f"{found[0]['all_s']:.2f}",
              f"{sent_bytes / 1e9:.2f}", f"{peak / 2**30:.2f}")],
        )  # fmt: skip
        report.keep(channel, {"updates": found, "stalls_s": stalls})
        if channel == "cuda_ipc":
            report.goal("cuda_ipc: seconds end to end", told["all_s"], at_most=1.0)
            report.goal("cuda_ipc: seconds of stall", stall, at_most=0.5)
    await engine.close()
    least = sent_bytes / LINK_BYTES_S
    report.say(f"- the bytes alone need {least:.3f} s at {LINK_BYTES_S / 1e9:.0f} GB/s")
    if len(sums) > 1 and all(one for pair in sums.values() for one in pair):
        (first_before, first), (second_before, second) = list(sums.values())[:2]
        is_equal = first == second and first_before == second_before and first != first_before
        report.goal(
            f"all {len(first)} weights are equal by both channels, and not before (1 = yes)", float(is_equal),
            at_least=1.0,
        )  # fmt: skip


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--channels", default="nccl,cuda_ipc")
    args.add_argument("--updates", type=int, default=5)
    args.add_argument("--fp8", action="store_true")
    args.add_argument("--bucket-mb", type=int, default=2048)
    options = args.parse_args()
    is_dry = options.device == "cpu"
    if is_dry:
        options.channels = "nccl"
    part = "weights_experts_fp8" if options.fp8 else "weights_experts"
    report = Report(part, is_dry=is_dry)
    work = work_folder() / part
    config = model_folder(work / "model", is_dry=is_dry, is_fp8=options.fp8)
    server = Server(
        folder=work / "model", log=work / "server.log", is_sglang=not is_dry, gpu=1, mem_fraction=0.75, max_running=16,
        context_length=0 if is_dry else 1024, visible="1,0",
        extra=("--load-format", "dummy", "--skip-tokenizer-init", "--incremental-streaming-output",
               *(FP8_SERVER if options.fp8 else ())),
    )  # fmt: skip
    with running(server):
        device = torch.device("cpu") if is_dry else torch.device("cuda", 0)
        world, chunks, tensors = made_rank(config, device)
        report.say(f"- Megatron rank with {sum(p.numel() for c in chunks for p in c.parameters()):,} parameters")
        try:
            server.wait(300)
            asyncio.run(measure(report, options, server, config, chunks, tensors, work))
        except ServerDiedError as error:
            report.failed(str(error))
        except BaseException:
            print(server.last_words(6000), file=sys.stderr)
            raise
        finally:
            world.close()
    report.end()


if __name__ == "__main__":
    main()
