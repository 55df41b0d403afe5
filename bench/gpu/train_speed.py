"""Training speed, MFU and memory of our backends, and of their log-prob pass: bf16, packs of 16k tokens.

    python train_speed.py [--cases torch:0.6b,torch:1.7b,megatron:0.6b,torch:0.6b:16] [--world 1] [--device cpu]
                          [--lengths lognormal] [--profile]

A third word of a case is a rank: low-rank adapters are trained in place of all weights. Every case has processes of
its own, one a GPU, as ranks of a gang under torchrun's variables. The backend is the one that `myxa up` builds from
the run file. A step: `--packs` packs of 16 sequences of 1024 tokens on every rank, GRPO loss on 896 of each,
gradients shared, AdamW. `--lengths lognormal`: as many tokens in packs as large, in sequences of lognormal lengths
(the same mean, sigma 0.8, at most four times the mean), other ones in every step. Tokens are all tokens of the packs.
MFU: see flops.py. Memory: the most that torch allocated on rank 0 from the first step on; of the log-prob pass, above
what is held anyway. Phases go to a case's log: one that ends at its limit shows where it was. `--profile`: where a
step's time goes, variants beside what it does, and the other lengths in the same process (train_profile.py).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from figures import Report, number, parser, percent, work_folder
from flops import forward_flops, mfu, train_flops
from make_model import make_apart
from servers import free_port
from trial_runs import stage

from myxa.actors.models.adapters import num_adapted
from myxa.actors.models.hf_folder import read_config
from myxa.core.config import load_config
from myxa.core.samples import TrainSample, TrainShard
from myxa.launch.actor_spec import ActorSpec, RankSpec
from myxa.launch.program import build_actor

WARM_UPS = 2
BEGAN_S = time.monotonic()
MARK = "FIGURES "
GOALS = {"0.6b": (("tokens/s", "rate", 60_000.0, False), ("peak memory, GiB", "memory_gib", 40.0, True)),
         "1.7b": (("MFU", "mfu", 0.42, False),)}  # fmt: skip
GOAL_DP4 = 124_000.0
GOAL_UNEQUAL = 0.7


# -- one rank ----------------------------------------------------------------------------------------------------------


SIGMA, LONGEST = 0.8, 4
"""Of lognormal lengths: their deviation, and the most as a multiple of the mean."""


def lengths_of(options: argparse.Namespace, rank: int, step: int) -> list[list[int]]:
    """Tokens of the sequences of each pack, prompt and answer; all packs have as many tokens."""
    if options.lengths == "equal":
        return [[options.length] * options.per_pack for _ in range(options.packs)]
    rng, mean, least = np.random.default_rng([11, step, rank]), options.length, max(2, options.length // 64)
    packs: list[list[int]] = []
    for _ in range(options.packs):
        left, pack = options.per_pack * mean, list[int]()
        while left:
            drawn = int(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA))
            length = min(max(drawn, least), LONGEST * mean, left)
            pack.append(length if left - length >= least else left)
            left -= pack[-1]
        packs.append(pack)
    return packs


def make_shard(options: argparse.Namespace, rank: int, vocab_size: int, step: int) -> TrainShard:
    """`packs` micro-batches of `per_pack * length` tokens; other samples on every rank and step."""
    rng, lengths = np.random.default_rng([step, rank]), lengths_of(options, rank, step)
    samples: list[TrainSample] = []
    packs: list[tuple[int, ...]] = []
    for pack in lengths:
        packs.append(tuple(range(len(samples), len(samples) + len(pack))))
        for length in pack:
            index, prompt_len = len(samples), max(1, length // 8)
            num_new = length - prompt_len
            samples.append(
                TrainSample(
                    group_id=index // 8,
                    index=index % 8,
                    prompt_ids=rng.integers(0, vocab_size, prompt_len).astype(np.int32),
                    response_ids=rng.integers(0, vocab_size, num_new).astype(np.int32),
                    loss_mask=np.ones(num_new, dtype=np.uint8),
                    logprobs=np.full(num_new, -np.log(vocab_size), dtype=np.float32),
                    versions=np.full(num_new, step, dtype=np.int32),
                    finish="stop",
                    advantage=1.0 if index % 2 else -1.0,
                )
            )
    others = [list(chain(*lengths_of(options, one, step))) for one in range(options.world)]
    return TrainShard(
        step=step,
        samples=tuple(samples),
        minibatches=(tuple(packs),),
        minibatch_tokens=(float(sum(length - max(1, length // 8) for own in others for length in own)),),
        minibatch_rollouts=(float(sum(map(len, others))),),
    )


class Gauge:
    """Time and memory on this rank's device."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._is_gpu = device == "cuda"

    def wait(self) -> None:
        if self._is_gpu:
            self._torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        self.wait()
        started_s = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started_s

    def reset(self) -> None:
        if self._is_gpu:
            self._torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        return self._torch.cuda.max_memory_allocated() / 2**30 if self._is_gpu else 0.0

    def held_gib(self) -> float:
        return self._torch.cuda.memory_allocated() / 2**30 if self._is_gpu else 0.0


def devices_text(options: argparse.Namespace) -> str:
    return "cpu" if options.device == "cpu" else ",".join(str(gpu) for gpu in range(options.world))


def parallel_sets(kind: str, world: int) -> list[str]:
    """Communication beside computation, as anybody with several GPUs would have it."""
    if kind != "megatron" or world == 1:
        return []
    return ["megatron.ddp.overlap_grad_reduce=true", "megatron.ddp.overlap_param_gather=true"]


def rank_sets(options: argparse.Namespace) -> list[str]:
    """What the run file is told besides."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return [
        f'roles.trainer.kind="{options.backend}"', f"roles.trainer.count={options.world}", f'trainer.dtype="{dtype}"',
        f"trainer.max_tokens_per_microbatch={options.per_pack * options.length}", 'algo.correction="none"',
        'roles.rollout.kind="embedded"', 'roles.rollout.devices="cpu"', f"rollout.max_new_tokens={options.length}",
        f"engine.context_length={(LONGEST + 1) * options.length}", *parallel_sets(options.backend, options.world),
        f'roles.trainer.devices="{devices_text(options)}"', *options.sets,
    ]  # fmt: skip


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Into this rank's log, as it begins and with its seconds as it ends."""
    started_s = time.perf_counter()
    print(f"{name} ...", flush=True)
    yield
    print(f"{name}: {time.perf_counter() - started_s:.1f} s", flush=True)


def saved(backend: Any, folder: Path) -> dict[str, float]:
    """Seconds that a checkpoint stops training, and its bytes. Collective."""
    started_s = time.perf_counter()
    pending = backend.begin_save(str(folder), {"version": 1})
    copied_s = time.perf_counter() - started_s
    pending.write()
    pending.finish()
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return {"checkpoint_s": copied_s, "checkpoint_bytes": num_bytes}


def rank_main(options: argparse.Namespace) -> None:
    """Set up, train, score; rank 0 prints its figures."""
    faulthandler.dump_traceback_later(max(options.limit - 5, 1))
    rank, kind = int(os.environ["RANK"]), options.backend
    config = load_config(options.folder / "async20.toml", rank_sets(options))
    devices = tuple(range(options.world)) if options.device == "cuda" else ()
    spec = ActorSpec(
        name=f"trainer/{rank}", role="trainer", kind=kind, index=rank, node=0, devices=devices[rank : rank + 1],
        visible_devices=devices, threads=4 if options.device == "cuda" else 1,
        rank=RankSpec(gang="trainer", rank=rank, world_size=options.world, local_rank=rank,
                      local_world_size=options.world, group_rank=0),
    )  # fmt: skip
    backend: Any = build_actor(spec, config, options.folder).backend  # pyright: ignore[reportAttributeAccessIssue]
    started_s = time.perf_counter()
    with phase("set up"):
        facts = backend.setup()
    setup_s = time.perf_counter() - started_s
    gauge = Gauge(options.device)
    vocab_size = json.loads((options.folder / "model" / "config.json").read_text())["vocab_size"]
    shards = [make_shard(options, rank, vocab_size, step) for step in range(WARM_UPS + options.steps)]
    for count, shard in enumerate(shards[:WARM_UPS]):
        with phase(f"warm up {count} (compiles what is fused)"):
            backend.train(shard, {})
    gauge.reset()
    with phase(f"{options.steps} steps"):
        steps_s = [gauge.seconds(lambda shard=shard: backend.train(shard, {})) for shard in shards[WARM_UPS:]]
    peak_gib = gauge.peak_gib()
    policy = backend._parts.stepper.policy
    layouts = [micro.layout for micros in policy.cut(shards[0], skips_neutral=False) for micro in micros]
    with phase("log-probs of one pack (compiles)"):
        policy.score(layouts[:1])
    held_gib = gauge.held_gib()
    gauge.reset()
    with phase("log-probs"):
        scores_s = [gauge.seconds(lambda: policy.score(layouts)) for _ in range(3)]
    score_gib = gauge.peak_gib() - held_gib
    unequal = with_unequal(options, backend, gauge, vocab_size) if options.profile else {}
    with phase("checkpoint"):
        checkpoint = saved(backend, options.folder / "checkpoint") if options.checkpoint else {}
    figures = {
        "facts": {name: str(value) for name, value in facts.items()},
        "setup_s": setup_s, "steps_s": steps_s, "peak_gib": peak_gib,
        "score_s": min(scores_s), "score_gib": score_gib, "held_gib": held_gib,
        "num_adapted": num_adapted(config.lora, read_config(options.folder / "model")), **checkpoint, **unequal,
    }  # fmt: skip
    if rank == 0:
        print(MARK + json.dumps(figures), flush=True)
    if options.profile:
        profile_rank(options, backend, gauge, layouts, read_config(options.folder / "model"))
    backend.close()
    sys.stdout.flush()
    os._exit(0)  # native threads of collectives have nothing more to do


def with_unequal(options: argparse.Namespace, backend: Any, gauge: Gauge, vocab_size: int) -> dict[str, Any]:
    """Seconds of steps and of a log-prob pass with lognormal lengths; every step has shapes of its own."""
    rank, own = int(os.environ["RANK"]), argparse.Namespace(**{**vars(options), "lengths": "lognormal"})
    shards = [make_shard(own, rank, vocab_size, 100 + step) for step in range(WARM_UPS + 3)]
    with phase("unequal lengths, warm up"):
        for shard in shards[:WARM_UPS]:
            backend.train(shard, {})
    with phase("unequal lengths"):
        steps_s = [gauge.seconds(lambda shard=shard: backend.train(shard, {})) for shard in shards[WARM_UPS:]]
        policy = backend._parts.stepper.policy
        layouts = [micro.layout for micros in policy.cut(shards[-1], skips_neutral=False) for micro in micros]
        scores_s = [gauge.seconds(lambda: policy.score(layouts)) for _ in range(2)]
    return {"unequal_steps_s": steps_s, "unequal_score_s": min(scores_s)}


def profile_rank(options: argparse.Namespace, backend: Any, gauge: Gauge, layouts: Sequence[Any], config: Any) -> None:
    """Where the time goes, and variants; see train_profile.py."""
    import train_profile as told

    report = Report(f"{options.part}_{options.backend}_{options.folder.name}", is_dry=options.device == "cpu")
    lengths = list(chain(*lengths_of(options, 0, 7)))
    tokens, flops, ahead = sum(lengths), train_flops(config, lengths), forward_flops(config, lengths)
    policy = backend._parts.stepper.policy

    def step_of(**changed: Any) -> Callable[[], Any]:
        shard = make_shard(argparse.Namespace(**{**vars(options), **changed}), 0, config.vocab_size, 7)
        return lambda: backend.train(shard, {})

    work = told.Work(
        report,
        gauge,
        train=step_of(),
        train_tiny=step_of(per_pack=1, length=8),
        train_unequal=step_of(lengths="lognormal"),
        score=lambda: policy.score(layouts),
        figures=lambda step_s, score_s: (
            tokens / step_s, mfu(flops, step_s), tokens / score_s, mfu(ahead, score_s),
        ),
        give_up_s=time.monotonic() + options.limit - (time.monotonic() - BEGAN_S) - 15,
        tflops=told.matrix_tflops(gauge, 8192 if options.device == "cuda" else 256),
    )  # fmt: skip
    if options.backend == "torch":
        ahead_M, live_M = policy.score(layouts[:1])[0].logprobs_M, policy.module(layouts[0], False).logprobs_M.detach()
        difference = float((ahead_M - live_M).abs().max())
        report.say(
            f"- largest difference of a log-prob between the log-prob pass and the training pass: {difference:g}"
        )
        del live_M
    variants = told.variants_of(options.backend)
    told.run(work, options.folder / "trace.json", variants)
    if not work.is_over():
        told.tell_attention(report, gauge, config, options.per_pack, options.length, options.device)
    report.keep("status", 0)


# -- all ranks of a case -----------------------------------------------------------------------------------------------


def run_case(options: argparse.Namespace, backend: str, folder: Path, rank: str) -> dict[str, Any] | str:
    """Rank 0's figures, or why there are none. `rank`: of the adapters; empty = all weights are trained."""
    base = {
        **os.environ, "WORLD_SIZE": str(options.world), "LOCAL_WORLD_SIZE": str(options.world), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4" if options.device == "cuda" else "1",
    }  # fmt: skip
    command = [
        sys.executable, str(Path(__file__).resolve()), "--device", options.device, "--world", str(options.world),
        "--packs", str(options.packs), "--per-pack", str(options.per_pack), "--length", str(options.length),
        "--steps", str(options.steps), "--limit", str(options.limit), "--lengths", options.lengths,
        "--backend", backend, "--folder", str(folder),
        *(["--checkpoint"] if options.checkpoint else []), *(["--profile"] if options.profile else []),
        "--part", options.part, "--sets", *options.sets, *([f"lora.rank={rank}"] if rank else []),
    ]  # fmt: skip
    name = f"train_{backend}_adapters" if rank else f"train_{backend}"
    logs = [folder / f"{name}_{number}.log" for number in range(options.world)]
    statuses = run_ranks(command, base, logs, options.limit)
    for line in logs[0].read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    first = next((number for number, status in enumerate(statuses) if status), 0)
    text = logs[first].read_text(encoding="utf-8", errors="replace")
    return f"rank {first} {how_it_ended(statuses[first])}: {text[-1800:]}"


def run_ranks(
    command: Sequence[str], base: Mapping[str, str], logs: Sequence[Path], limit_s: float
) -> list[int | None]:
    """The same command once for each log, as ranks of a gang, to their end; none outlives the call."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        return wait_for(processes, limit_s)
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


def how_it_ended(status: int | None) -> str:
    """Of a rank, as told by `wait_for`."""
    return "was not through in time" if status is None else f"ended with {status}"


def wait_for(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Statuses once all ended, or soon after the first failed, or at the limit."""
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        statuses = [process.poll() for process in processes]
        if None not in statuses:
            return statuses
        if any(statuses):
            time.sleep(3)  # the others may have more to say
            return [process.poll() for process in processes]
        time.sleep(0.1)
    return [process.poll() for process in processes]


def derive(options: argparse.Namespace, config: Any, found: dict[str, Any]) -> dict[str, float]:
    """Rates from times."""
    lengths = [
        length for rank in range(options.world) for pack in lengths_of(options, rank, WARM_UPS) for length in pack
    ]
    tokens = sum(lengths)
    step_s, score_s = median(found["steps_s"]), found["score_s"]
    return {
        "rate": tokens / step_s,
        "step_s": step_s,
        "mfu": mfu(train_flops(config, lengths, int(found["num_adapted"])), step_s, options.world),
        "memory_gib": found["peak_gib"],
        "score_rate": tokens / score_s,
        "score_mfu": mfu(forward_flops(config, lengths), score_s, options.world),
        "score_gib": found["score_gib"],
        "setup_s": found["setup_s"],
        "checkpoint_mb": found.get("checkpoint_bytes", math.nan) / 1e6,
        "unequal_rate": tokens / median(found.get("unequal_steps_s", [math.nan])),
        "unequal_score_rate": tokens / found.get("unequal_score_s", math.nan),
    }


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


HEAD = ("backend, shape", "GPUs", "tokens/s", "step ms", "MFU", "peak GiB", "log-prob pass tokens/s", "its MFU",
        "its memory GiB", "set-up s", "checkpoint MB", "unequal lengths: tokens/s", "of equal ones",
        "its log-prob pass of equal")  # fmt: skip


def row(name: str, world: int, figures: dict[str, float]) -> tuple[str, ...]:
    return (
        name, str(world), number(figures["rate"]), number(figures["step_s"] * 1e3), percent(figures["mfu"]),
        number(figures["memory_gib"]), number(figures["score_rate"]), percent(figures["score_mfu"]),
        number(figures["score_gib"]), number(figures["setup_s"]), number(figures["checkpoint_mb"]),
        number(figures["unequal_rate"]), percent(figures["unequal_rate"] / figures["rate"]),
        percent(figures["unequal_score_rate"] / figures["score_rate"]),
    )  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    report = Report(options.part, is_dry=options.device == "cpu")
    rows: list[tuple[str, ...]] = []
    failures: list[str] = []
    best: dict[tuple[str, str], float] = {}
    for case in options.cases.split(","):
        backend, shape, *rank = case.split(":")
        shape = shape if options.device == "cuda" else "dry"
        folder = work_folder() / f"train_{shape}"
        stage(folder, "async20.toml", "spread_reward.py")
        config = make_apart(folder / "model", shape, options.device)
        started_s = time.monotonic()
        found = run_case(options, backend, folder, *(rank or [""]))
        report.say(f"- {case}: {time.monotonic() - started_s:.0f} s")
        if isinstance(found, str):
            failures.append(case)
            report.say(f"  FAILED: {found}")
            continue
        figures = derive(options, config, found)
        name = f"{backend} {shape}, adapters of rank {rank[0]}" if rank else f"{backend} {shape}"
        rows.append(row(name, options.world, figures))
        report.say(f"  {', '.join(f'{head} {cell}' for head, cell in zip(HEAD, rows[-1], strict=True))}")
        report.keep(case, {"figures": figures, "found": found})
        if options.device == "cuda" and "unequal_steps_s" in found:
            share = figures["unequal_rate"] / figures["rate"]
            report.goal(f"{case}: tokens/s of unequal lengths, of those of equal ones", share, at_least=GOAL_UNEQUAL)
        for _, name, _, _ in () if rank else GOALS.get(shape, ()):
            lower = name == "memory_gib"
            known = best.get((shape, name))
            pick = min if lower else max
            best[shape, name] = figures[name] if known is None else pick(known, figures[name])
        if shape == "1.7b" and options.world == 4 and not rank:
            best[shape, "dp4"] = max(best.get((shape, "dp4"), 0.0), figures["rate"])
    packs = f"{options.packs} packs of {options.per_pack} x {options.length} tokens a step on every GPU"
    packs += "" if options.lengths == "equal" else f", in sequences of {options.lengths} lengths"
    if rows:
        report.table(f"Training, {packs}", HEAD, rows)
    judge(report, options, best)
    if failures:
        report.failed(f"{', '.join(failures)}")
    report.end()


def judge(report: Report, options: argparse.Namespace, best: dict[tuple[str, str], float]) -> None:
    """The goals of the shapes that were asked for, by the best backend."""
    asked = (
        {words[1] for case in options.cases.split(",") if len(words := case.split(":")) == 2}
        if options.device == "cuda"
        else set()
    )
    for shape in sorted(asked & set(GOALS)) if options.world == 1 else ():
        for text, name, limit, is_at_most in GOALS[shape]:
            bound = {"at_most": limit} if is_at_most else {"at_least": limit}
            report.goal(f"{shape} {text}, one GPU", best.get((shape, name)), **bound)
    if options.world == 4 and "1.7b" in asked:
        report.goal("1.7b tokens/s, four GPUs", best.get(("1.7b", "dp4")), at_least=GOAL_DP4)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--cases", default="torch:0.6b,torch:1.7b", help="backend:shape[:rank of adapters], ...")
    args.add_argument("--part", default="train", help="name of the part in the results")
    args.add_argument("--world", type=int, default=1)
    args.add_argument("--packs", type=int, default=4)
    args.add_argument("--per-pack", type=int, default=16)
    args.add_argument("--length", type=int, default=1024, help="of a sequence, or their mean")
    args.add_argument("--lengths", choices=("equal", "lognormal"), default="equal")
    args.add_argument("--steps", type=int, default=5)
    args.add_argument("--limit", type=float, default=100.0, help="seconds a case may take")
    args.add_argument("--checkpoint", action="store_true", help="write one, and say its size")
    args.add_argument("--profile", action="store_true", help="where a step's time goes; variants; unequal lengths")
    args.add_argument("--sets", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    args.add_argument("--backend", default="", help=argparse.SUPPRESS)
    args.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.backend:
        rank_main(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
