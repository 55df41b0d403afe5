"""Where the time of a training step goes, and what else could be done: for `train_speed.py --profile`.

The table is made of torch's trace of one warm step: each kernel belongs to the group of the code that launched it. GPU
idle: the time of a step without the profiler, less the time in which kernels ran. Variants run in the same process on
the same packs, one after another, as patches of the torch backend; one that fails is told and left out. Rows come as
they are made, and nothing new is begun once `--limit` is near.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from figures import Report, number, percent
from flops import PEAK
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from myxa.actors.backends import vocab_scores
from myxa.actors.backends.torch_backend import model, parallel
from myxa.actors.backends.torch_backend.layout import Layout

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


BOUNDS: dict[int, tuple[Layout, Tensor, int]] = {}
BY_CUDNN = ["cudnn"]
"""Empty: by flash attention."""


def bounds_of(layout: Layout) -> tuple[Tensor, int]:
    """Where sequences begin and the last one ends, int32, and the longest."""
    if id(layout) not in BOUNDS:
        if len(BOUNDS) > 32:
            BOUNDS.clear()
        starts = torch.nonzero(layout.positions_T == 0).flatten()
        bounds = torch.cat([starts, starts.new_tensor([layout.num_tokens])]).to(torch.int32)
        BOUNDS[id(layout)] = layout, bounds, max(block.row_len for block in layout.blocks)
    return BOUNDS[id(layout)][1:]


@vocab_scores.fused
def _packed_before(x_Th: Tensor, layer: Any, rope: tuple[Tensor, Tensor], _: Tensor, __: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of packed tokens."""
    return layer.self_attn.projected(layer.input_layernorm(x_Th), rope)


def packed_attended(self: Any, heads: tuple[Tensor, ...], layout: Layout, rows_N: Tensor | None) -> Tensor:
    """Attention over packed sequences, without rectangles; no prompts are shared here."""
    if not heads[0].is_cuda:
        heads = tuple(x.index_select(0, layout.index_S) for x in heads)
        return PADDED(self, heads, layout, rows_N)
    bounds, longest = bounds_of(layout)
    if BY_CUDNN:
        cudnn = torch.ops.aten._cudnn_attention_forward
        found = cudnn(*heads, None, bounds, bounds, longest, longest, True, 0.0, True, False)
    else:
        flash = torch.ops.aten._flash_attention_forward
        found = flash(*heads, bounds, bounds, longest, longest, 0.0, True, False)
    out = found[0].flatten(1)
    return out if rows_N is None else model.pick_rows(out, rows_N)


@vocab_scores.fused
def _after_apart(x: Tensor, layer: Any, attended: Tensor) -> Tensor:
    """Residuals are added by the kernel of the norm, not by the product's: that would copy them first."""
    x = (x.float() + layer.self_attn.o_proj(attended).float()).to(x.dtype)
    return (x.float() + layer.mlp(layer.post_attention_layernorm(x)).float()).to(x.dtype)


PADDED = model.SelfAttention.attended
Patches = list[tuple[Any, str, Any]]
NOT_KEPT: Patches = [(vocab_scores, "KEPT_LOGITS", 0)]
APART: Patches = [(model, "_after_attention", _after_apart)]
PACKED: Patches = [(model, "_before_attention", _packed_before), (model.SelfAttention, "attended", packed_attended)]
VARIANTS: dict[str, Patches] = {
    "logits not kept": NOT_KEPT,
    "residuals apart from products": APART,
}
WIDE = "packs twice as large"
OF_A_SHAPE: Patches = [
    (model, name, torch.compile(cast(Any, getattr(model, name)).__wrapped__, dynamic=False))
    for name in ("_before_attention", "_after_attention")
]
LAST: dict[str, Patches] = {
    WIDE: [],
    "attention of packed rows by cuDNN": PACKED,
    "compiled for one shape": OF_A_SHAPE,
}


def variants_of(backend: str) -> dict[str, Patches]:
    if backend == "megatron":
        from myxa.actors.backends.megatron import schedule

        return {"logits kept": [(schedule, "score_rows", partial(vocab_scores.score_rows, keeps_logits=True))]}
    return {**VARIANTS, **(LAST if torch.cuda.is_available() else {})}


@dataclass(frozen=True)
class Work:
    """What a step and a log-prob pass are here, and how their figures are told."""

    report: Report
    gauge: Any
    train: Callable[[int], Any]
    """A step of packs so many times as large."""
    score: Callable[[], Any]
    figures: Callable[[float, float], tuple[float, float, float, float]]
    """(seconds of a step, of a log-prob pass) -> (tokens/s, MFU, log-prob tokens/s, its MFU)"""
    give_up_s: float
    """On `time.monotonic`."""
    tflops: float

    def is_over(self) -> bool:
        return time.monotonic() > self.give_up_s

    def measure(self, name: str, *, times: int = 1) -> tuple[float, float]:
        """Seconds of a step and of a pass, told as a row."""
        began_s = time.monotonic()
        for _ in range(2):
            self.train(times)
        self.gauge.reset()
        step_s = min(self.gauge.seconds(lambda: self.train(times)) for _ in range(2))
        norm = self.train(times).metrics["train/grad_norm"]
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


def run(work: Work, log: Path, variants: dict[str, Patches], small: Callable[[], None]) -> None:
    """As it is, the trace, variants, single parts (`small`)."""
    head = ("variant", "step ms", "tokens/s", "MFU", "peak GiB", "log-prob pass tokens/s", "its MFU",
            "of the matrix rate", "gradient norm", "s to measure")  # fmt: skip
    top = "| " + " | ".join(head) + " |\n|" + "---|" * len(head)
    work.report.say(f"Matrix rate here: {work.tflops:.0f} TFLOP/s\n\n{top}")
    step_s, score_s = work.measure("as it is")
    work.report.say("")
    with marked():
        tell_trace(work.report, *traced(lambda: work.train(1), work.gauge.wait, log), step_s)
    kernels, _ = traced(work.score, work.gauge.wait, log)
    work.report.say(f"- log-prob pass: {number(score_s * 1e3)} ms, kernels {number(busy(kernels) / 1e3)} ms\n")
    tell_shares(work.report, kernels)
    work.report.say(top)
    for name, patches in variants.items():
        if work.is_over():
            work.report.say(f"| {name} | no time is left |" + " - |" * (len(head) - 2))
            continue
        try:
            with patched(*patches):
                work.measure(name, times=2 if name == WIDE else 1)
        except RuntimeError as error:
            work.report.say(f"| {name} | {type(error).__name__}: {str(error)[:300]!r} |" + " - |" * (len(head) - 2))
    work.report.say("")
    if not work.is_over():
        small()


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


def tell_products(report: Report, gauge: Any, config: Any, tokens: int, device: str) -> None:
    """TFLOP/s of the products of a layer: forward, gradient of the input, gradient of the weight; apart and joined."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    sizes = {"q": (heads, width), "k or v": (kv, width), "q, k, v": (heads + 2 * kv, width), "o": (width, heads),
             "gate or up": (inner, width), "gate, up": (2 * inner, width), "down": (width, inner)}  # fmt: skip
    dtype, times = (torch.bfloat16, 20) if device == "cuda" else (torch.float32, 1)
    rows: list[tuple[str, ...]] = []
    for name, (num_out, num_in) in sizes.items():
        x, g, w = (torch.randn(shape, device=device, dtype=dtype)
                   for shape in ((tokens, num_in), (tokens, num_out), (num_out, num_in)))  # fmt: skip
        rates: list[float] = []
        for product in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x):  # noqa: B023
            product()
            seconds = gauge.seconds(lambda: [product() for _ in range(times)]) / times  # noqa: B023
            rates.append(2 * tokens * num_in * num_out / seconds / 1e12)
        rows.append((f"{name}: {num_in} -> {num_out}", *(number(rate) for rate in rates)))
    report.table(f"Products of {tokens} tokens, TFLOP/s", ("weight", "forward", "input", "weight's"), rows)


def tell_attention(report: Report, gauge: Any, config: Any, num: int, length: int, device: str) -> None:
    """Milliseconds of causal attention of one pack in one layer, by each of torch's kernels; last by one that may end
    what the device can do for this process."""
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

    def packed_by_cudnn() -> Tensor:
        cudnn = torch.ops.aten._cudnn_attention_forward
        return cudnn(q, k, v, None, bounds, bounds, length, length, True, 0.0, True, False)[0].flatten(1)

    kinds: list[tuple[str, Any, Callable[[], Tensor]]] = [("as torch chooses", contextlib.nullcontext, padded)]
    one_of = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    kinds += [(backend.name.lower(), lambda backend=backend: sdpa_kernel(backend), padded) for backend in one_of]
    kinds.append(("flash, packed", contextlib.nullcontext, packed))
    kinds.append(("cudnn, packed", contextlib.nullcontext, packed_by_cudnn))
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
