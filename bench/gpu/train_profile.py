"""Where the time of a training step goes, and what else could be done: for `train_speed.py --profile`.

The table is made of torch's trace of one warm step: each kernel belongs to the group of the code that launched it. GPU
idle: the time of a step without the profiler, less the time in which kernels ran; gaps say which launches the GPU
waited for. The host alone: the same step with next to no tokens. Reads: where the host waits for the device, as torch's
own check of synchronising calls finds them. Variants run in the same process on the same packs, one after another, as
patches of the backend; one that fails is told and left out. Rows come as they are made, and nothing new is begun once
`--limit` is near.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
import torch._inductor.config as inductor_config
from figures import Report, number, percent
from flops import PEAK
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from myxa.actors.backends import vocab_scores
from myxa.actors.backends.torch_backend import model, parallel
from myxa.core.errors import MyxaError

STEP = "bench:step"
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|linear|matmul)$", re.IGNORECASE)
ATTENTION = re.compile(r"flash|fmha|sdpa|scaled_dot_product", re.IGNORECASE)
CAST = re.compile(r"triton_\w+?_fused__to_copy(_t|_transpose)?_\d+$")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
PADDING = ("_PadRows", "_UnpadRows", "_PickRows", "aten::cat", "CatBackward", "aten::index_select")


# -- the trace of a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device, in microseconds."""

    name: str
    start: float
    length: float
    around: str
    """Names of the host's slices that it was launched in, outermost first, a line each."""

    @property
    def is_backward(self) -> bool:
        return "autograd::engine::evaluate_function" in self.around

    @property
    def group(self) -> str:
        """What it belongs to."""
        name, around = self.name, self.around
        if name.startswith("gpu_mem"):
            return "copies and fills by the driver"
        for mark, group in (("bench:optimizer", "optimizer"), ("bench:norm", "gradient norm"), ("bench:loss", "loss")):
            if mark in around:
                return group
        if "_ScoreRows" in around:
            return "head: products" if PRODUCT.search(name) else "head: softmax and sums"
        if ATTENTION.search(name) or "scaled_dot_product" in around:
            return "attention"
        if PRODUCT.search(name):
            return "products of the layers"
        if "mbedding" in around or "mbedding" in name:
            return "embedding"
        if "AccumulateGrad" in around:
            return "sums of gradients"
        if CAST.search(name) or "ToCopyBackward" in around or "aten::_to_copy" in around:
            return "casts of weights and gradients"
        if any(word in around or word in name for word in PADDING):
            return "padding for attention"
        return "norms, rotary, SwiGLU, residuals"


def read_trace(path: Path) -> tuple[list[Kernel], float]:
    """(kernels of the step, its microseconds). On a CPU the outermost operators stand for kernels."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    step = next(e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    begin, end = step["ts"], step["ts"] + step["dur"]
    own = [e for e in events if begin <= e["ts"] <= end and e is not step]
    on_device = [e for e in own if e.get("cat") in KERNELS]
    calls = [e for e in own if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {e["args"]["correlation"]: e for e in calls if "correlation" in e.get("args", {})}
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in own:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    kernels: list[Kernel] = []
    if not on_device:
        for slices in threads.values():
            for event, stack in nested(slices, slices):
                if event["name"].startswith("aten::") and not any(e["name"].startswith("aten::") for e in stack):
                    kernels.append(Kernel(event["name"], event["ts"], event["dur"], lines_of(stack)))
        return kernels, step["dur"]
    launched: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    around: dict[int, str] = {}
    for event in launches.values():
        launched[event["tid"]].append(event)
    for thread, events_of in launched.items():
        for event, stack in nested(events_of, threads[thread]):
            around[event["args"]["correlation"]] = lines_of(stack)
    for event in on_device:
        name = event["name"] if event["cat"] == "kernel" else event["cat"]
        where = around.get(event.get("args", {}).get("correlation"), "")
        kernels.append(Kernel(name, event["ts"], event["dur"], where))
    return kernels, step["dur"]


def nested(
    events: Sequence[dict[str, Any]], slices: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each event with the slices of its thread that it lies in, outermost first."""
    ordered = sorted(slices, key=lambda e: (e["ts"], -e["dur"]))
    stack: list[dict[str, Any]] = []
    at = 0
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while at < len(ordered) and (ordered[at]["ts"], -ordered[at]["dur"]) < (event["ts"], -event["dur"]):
            stack.append(ordered[at])
            at += 1
        stack = [e for e in stack if e["ts"] + e["dur"] > event["ts"]]
        yield event, stack


def lines_of(stack: Sequence[dict[str, Any]]) -> str:
    return "\n".join(e["name"] for e in stack)


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        end = kernel.start + kernel.length
        total += max(0.0, end - max(kernel.start, until))
        until = max(until, end)
    return total


def traced(work: Callable[[], Any], wait: Callable[[], None], path: Path) -> tuple[list[Kernel], float]:
    """The trace of one call, after one that is not counted."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities), record_function(STEP):
        work()
        wait()
    with profile(activities=activities) as trace, record_function(STEP):
        work()
        wait()
    trace.export_chrome_trace(str(path))
    return read_trace(path)


def tell_trace(report: Report, kernels: Sequence[Kernel], traced_us: float, step_s: float) -> None:
    """The table by groups, and the kernels that took most."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    tops: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        sums[kernel.group][kernel.is_backward] += kernel.length / 1e3
        sums[kernel.group][2] += 1
        top = tops[kernel.group, kernel.name[:90]]
        top[0] += kernel.length / 1e3
        top[1] += 1
    busy_ms, step_ms = busy(kernels) / 1e3, step_s * 1e3
    idle = max(0.0, step_ms - busy_ms)
    rows = [
        (group, number(ahead + back), percent((ahead + back) / step_ms), number(ahead), number(back), number(count))
        for group, (ahead, back, count) in sorted(sums.items(), key=lambda item: -sum(item[1][:2]))
    ]
    rows.append(("GPU idle", number(idle), percent(idle / step_ms), "-", "-", "-"))
    title = (
        f"A step of {number(step_ms)} ms (with the profiler {number(traced_us / 1e3)} ms), kernels {number(busy_ms)} ms"
    )
    report.table(title, ("group", "ms", "share", "not backward", "backward", "kernels"), rows)
    most = sorted(tops.items(), key=lambda item: -item[1][0])[:40]
    report.table("Kernels that took most", ("group", "kernel", "ms", "times"),
                 [(group, name, number(ms), number(count)) for (group, name), (ms, count) in most])  # fmt: skip
    report.keep(
        "groups_ms", {group: {"not_backward": a, "backward": b, "kernels": n} for group, (a, b, n) in sums.items()}
    )
    report.keep("kernels_ms", [[group, name, ms, count] for (group, name), (ms, count) in most])


@contextlib.contextmanager
def marked() -> Generator[None]:
    """Names in the trace for what has none."""
    targets = ((parallel.TorchModel, "update", "bench:optimizer"), (parallel.TorchModel, "gradient_norm", "bench:norm"))
    with contextlib.ExitStack() as stack:
        for owner, name, mark in targets:
            stack.enter_context(patched((owner, name, record_function(mark)(getattr(owner, name)))))
        from myxa.actors.backends.torch_backend.accounting import TrainingStep

        loss = record_function("bench:loss")(TrainingStep.policy_loss)
        stack.enter_context(patched((TrainingStep, "policy_loss", loss)))
        yield


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Generator[None]:
    """Attributes, or items of a dict, for a while."""
    old = [owner[name] if isinstance(owner, dict) else getattr(owner, name) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            put(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(patches, old, strict=True):
            put(owner, name, value)


def put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


# -- variants ----------------------------------------------------------------------------------------------------------


def anew(function: Any) -> Any:
    """What `fused` wraps, as code of its own: Dynamo keeps what it compiled with the code."""
    plain = function.__wrapped__
    return FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__)


Patches = list[tuple[Any, str, Any]]


def variants_of(backend: str) -> dict[str, Patches]:
    """By name; a later one holds earlier ones, where it says so."""
    if backend == "megatron":
        from myxa.actors.backends.megatron import attention, schedule

        def normed(self: Any, x: Tensor) -> Tensor:
            return _normed(x, self)

        kept = (schedule, "score_rows", partial(vocab_scores.score_rows, keeps_logits=True))
        norms = (attention.MegatronRMSNorm, "forward", normed)
        return {"logits kept": [kept], "and norms of the stream compiled": [kept, norms]}
    whole = [(vocab_scores, name) for name in ("_measured", "_turn_to_gradient")]
    whole += [(model, "_before_attention"), (model, "_after_attention")]
    again: Patches = [(owner, name, vocab_scores.fused(anew(getattr(owner, name)))) for owner, name in whole]
    return {"all compiled anew, at this size": [*again, (inductor_config, "force_disable_caches", True)]}


@vocab_scores.fused
def _normed(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


@dataclass(frozen=True)
class Work:
    """What a step and a log-prob pass are here, and how their figures are told."""

    report: Report
    gauge: Any
    train: Callable[[], Any]
    train_tiny: Callable[[], Any]
    """As many packs with next to no tokens."""
    train_unequal: Callable[[], Any]
    score: Callable[[], Any]
    figures: Callable[[float, float], tuple[float, float, float, float]]
    """(seconds of a step, of a log-prob pass) -> (tokens/s, MFU, log-prob tokens/s, its MFU)"""
    give_up_s: float
    """On `time.monotonic`."""
    tflops: float

    def is_over(self) -> bool:
        return time.monotonic() > self.give_up_s

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds of a step and of a pass, told as a row."""
        began_s = time.monotonic()
        for _ in range(2):
            self.train()
        self.gauge.reset()
        step_s = min(self.gauge.seconds(self.train) for _ in range(2))
        norm = self.train().metrics["train/grad_norm"]
        peak_gib = self.gauge.peak_gib()
        self.score()
        score_s = min(self.gauge.seconds(self.score) for _ in range(3))
        rate, mfu, score_rate, score_mfu = self.figures(step_s, score_s)
        self.report.say(
            f"| {name} | {number(step_s * 1e3)} | {number(rate)} | {percent(mfu)} | {number(peak_gib)} | "
            f"{number(score_rate)} | {percent(score_mfu)} | {percent(score_mfu * PEAK / 1e12 / self.tflops)} | "
            f"{norm:.5g} | {time.monotonic() - began_s:.0f} |"
        )
        self.report.keep(name, {"step_s": step_s, "mfu": mfu, "rate": rate, "peak_gib": peak_gib,
                                "score_rate": score_rate, "score_mfu": score_mfu})  # fmt: skip
        return step_s, score_s


def run(work: Work, log: Path, variants: dict[str, Patches]) -> None:
    """As it is, the trace, the host alone, variants, the trace of unequal lengths."""
    head = ("variant", "step ms", "tokens/s", "MFU", "peak GiB", "log-prob pass tokens/s", "its MFU",
            "of the matrix rate", "gradient norm", "s to measure")  # fmt: skip
    top = "| " + " | ".join(head) + " |\n|" + "---|" * len(head)
    work.report.say(f"Matrix rate here: {work.tflops:.0f} TFLOP/s\n\n{top}")
    step_s, score_s = work.measure("as it is")
    work.report.say("")
    with marked():
        tell_trace(work.report, *traced(work.train, work.gauge.wait, log), step_s)
    kernels, _ = traced(work.score, work.gauge.wait, log)
    work.report.say(f"- log-prob pass: {number(score_s * 1e3)} ms, kernels {number(busy(kernels) / 1e3)} ms\n")
    tell_shares(work.report, kernels)
    tell_gaps(work.report, "the log-prob pass", kernels)
    tell_reads(work)
    work.report.say(top)
    for name, patches in variants.items():
        if work.is_over():
            work.report.say(f"| {name} | no time is left |" + " - |" * (len(head) - 2))
            continue
        try:
            with patched(*patches):
                work.measure(name)
        except (RuntimeError, MyxaError) as error:
            work.report.say(f"| {name} | {type(error).__name__}: {str(error)[:300]!r} |" + " - |" * (len(head) - 2))
    work.report.say("")
    if not work.is_over():
        kernels, _ = traced(work.train_unequal, work.gauge.wait, log)
        work.report.say(f"- a step of unequal lengths: kernels {number(busy(kernels) / 1e3)} ms\n")
        tell_shares(work.report, kernels)
        tell_gaps(work.report, "a step of unequal lengths", kernels)


GAP_US = 10.0


def tell_gaps(report: Report, what: str, kernels: Sequence[Kernel]) -> None:
    """Milliseconds in which nothing ran, by what was launched next: the outermost operator and the innermost one."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    until = min((kernel.start for kernel in kernels), default=0.0)
    for kernel in sorted(kernels, key=lambda k: k.start):
        if kernel.start - until > GAP_US:
            around = [line for line in kernel.around.splitlines() if line != STEP] or ["-"]
            found = sums[f"{around[0][:60]} ... {around[-1][:60]}"]
            found[0] += (kernel.start - until) / 1e3
            found[1] += 1
        until = max(until, kernel.start + kernel.length)
    most = sorted(sums.items(), key=lambda item: -item[1][0])[:8]
    whole, times = (sum(found[at] for found in sums.values()) for at in (0, 1))
    report.table(f"Gaps of more than {GAP_US:.0f} us in {what}: {number(whole)} ms, {times:.0f} times",
                 ("before what was launched in", "ms", "times"),
                 [(name, number(ms), number(count)) for name, (ms, count) in most])  # fmt: skip


def tell_reads(work: Work) -> None:
    """Where the host waits for the device in a step and in a log-prob pass, and what the host takes alone."""
    tiny_s = min(work.gauge.seconds(work.train_tiny) for _ in range(3))
    work.report.say(f"- the host alone: a step of as many packs with next to no tokens takes {number(tiny_s * 1e3)} ms")
    work.report.keep("host_s", tiny_s)
    if not torch.cuda.is_available():
        return
    for what, call in (("a step", work.train), ("the log-prob pass", work.score)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in told
                         if "synchroniz" in str(one.message))  # fmt: skip
        most = ", ".join(f"{place} ({count})" for place, count in places.most_common(12))
        work.report.say(f"- reads in {what}: {sum(places.values())}: {most}")
    work.report.say("")


def tell_shares(report: Report, kernels: Sequence[Kernel]) -> None:
    """In one line."""
    sums: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.group] += kernel.length / 1e3
    report.say("- " + ", ".join(f"{group} {number(ms)} ms" for group, ms in sorted(sums.items(), key=lambda i: -i[1])))


# -- single parts ------------------------------------------------------------------------------------------------------


def matrix_tflops(gauge: Any, size: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = 30 if device == "cuda" else 1
    gauge.seconds(lambda: torch.mm(a, b))
    return 2 * size**3 * times / gauge.seconds(lambda: [torch.mm(a, b) for _ in range(times)]) / 1e12


def tell_attention(report: Report, gauge: Any, config: Any, num: int, length: int, device: str) -> None:
    """Milliseconds of causal attention of one pack in one layer, by each of torch's kernels. (cuDNN's for packed rows
    makes a plan in every call, 64 ms on an H200, and its gradients were not finite.)"""
    if device != "cuda":
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    make = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(num * length, heads, config.head_dim, **cast(Any, make)).requires_grad_()
               for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads))  # fmt: skip
    bounds = torch.arange(0, num * length + 1, length, device=device, dtype=torch.int32)

    def padded() -> Tensor:
        rows = tuple(x.view(num, length, -1, config.head_dim).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def packed() -> Tensor:
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, bounds, bounds, length, length, 0.0, True, False)[0].flatten(1)

    kinds: list[tuple[str, Any, Callable[[], Tensor]]] = [("as torch chooses", contextlib.nullcontext, padded)]
    one_of = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    kinds += [(backend.name.lower(), lambda backend=backend: sdpa_kernel(backend), padded) for backend in one_of]
    kinds.append(("flash, packed", contextlib.nullcontext, packed))
    flops = 4 * num * config.num_heads * config.head_dim * length * length / 2
    grad = torch.randn(num * length, config.num_heads * config.head_dim, **cast(Any, make))
    rows: list[tuple[str, ...]] = []
    for name, around, attend in kinds:
        try:
            with around():
                out = attend()
                back = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)  # noqa: B023, E731
                back()
                ahead_s = gauge.seconds(lambda: [attend() for _ in range(10)]) / 10  # noqa: B023
                back_s = gauge.seconds(lambda: [back() for _ in range(10)]) / 10  # noqa: B023
        except RuntimeError as error:
            rows.append((name, str(error)[:120], "-", "-", "-"))
            continue
        rows.append((name, number(ahead_s * 1e3), number(flops / ahead_s / 1e12), number(back_s * 1e3),
                     number(2.5 * flops / back_s / 1e12)))  # fmt: skip
    report.table(f"Attention of {num} x {length} tokens in one layer",
                 ("kernel", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"), rows)  # fmt: skip
