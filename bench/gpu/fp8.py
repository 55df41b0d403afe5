"""FP8 rollout with bfloat16 training: does it learn, how far are the log-probs, what do memory and speed gain?

    python fp8.py [--backend torch|megatron] [--shape 20m] [--device cpu]

First the runs of `learn.py`, attached to a server that holds its projections as FP8 in blocks (`myxa convert --dtype
fp8`): every version is quantised on its way, truncated importance sampling corrects for the difference. Then servers of
the 0.6B shape, one after the other: bfloat16, FP8, FP8 with its KV cache in FP8; random weights, the same requests.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
from figures import Report, parser, work_folder
from make_model import make_apart, make_learner
from reverse_task import write_data
from run_figures import read_run, tell_run
from servers import Server, ServerDiedError, running
from trial_runs import (
    AS_LAUNCHED,
    RunFailedError,
    Stopwatch,
    add_choices,
    add_learner,
    attach_override,
    chosen,
    imitated,
    overrides,
    stage,
    up,
)

from myxa.actors.backends.convert import quantise_folder

REWARD = 0.85
TRITON = ("--fp8-gemm-backend", "triton")
VARIANTS = {"bfloat16": (), "FP8": TRITON, "FP8, KV cache too": (*TRITON, "--kv-cache-dtype", "fp8_e4m3")}
NUM_REQUESTS, NUM_NEW = 256, 256


async def generated(url: str, vocab_size: int) -> float:
    """Tokens a second of all requests at once."""
    params = {"temperature": 1.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        ids = [(number * 131 + place * 7) % vocab_size for place in range(64)]
        async with session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": params}) as reply:
            reply.raise_for_status()
            return int((await reply.json())["meta_info"]["completion_tokens"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(one(session, number) for number in range(NUM_REQUESTS)))  # warm
        began = time.perf_counter()
        tokens = await asyncio.gather(*(one(session, 1000 + number) for number in range(NUM_REQUESTS)))
        return sum(tokens) / (time.perf_counter() - began)


def memory_of(url: str) -> tuple[str, str]:
    """GiB of weights, and tokens that the KV cache holds, as the server says."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
        facts = json.loads(answer.read())
    usage = (facts.get("internal_states") or [{}])[0].get("memory_usage", {})
    return str(usage.get("weight", "-")), str(facts.get("max_total_num_tokens") or usage.get("token_capacity", "-"))


def compare_servers(report: Report, work: Path) -> None:
    shape = make_apart(work / "shape", "0.6b", "cuda")
    quantise_folder(work / "shape", work / "shape_fp8")
    rows: list[tuple[str, ...]] = []
    for name, extra in VARIANTS.items():
        folder = work / ("shape_fp8" if extra else "shape")
        server = Server(
            folder=folder, log=work / "shape.log", is_sglang=True, mem_fraction=0.2, context_length=1024, extra=extra
        )
        with running(server):
            try:
                url = server.wait()
                rate = asyncio.run(generated(url, shape.vocab_size))
                rows.append((name, *memory_of(url), f"{rate:,.0f}"))
            except ServerDiedError as error:
                rows.append((name, "-", "-", f"refused: {error!s:.600}"))
    report.table(
        f"0.6B shape, {NUM_REQUESTS} requests of 64 + {NUM_NEW} tokens at once, 20 % of the GPU's memory",
        ("server", "weights, GiB", "tokens in the KV cache", "tokens/s"), rows,
    )  # fmt: skip


def main() -> None:
    args = parser(__doc__)
    add_choices(args)
    add_learner(args)
    args.add_argument("--limit", type=float, default=200.0, help="seconds that the second run may take")
    options = args.parse_args()
    choice = chosen(options)
    report = Report("fp8", is_dry=choice.is_cpu)
    work = work_folder() / "fp8"
    stage(work, "learn_sft.toml", "learn_colocated.toml")
    watch = Stopwatch(report)
    config = make_learner(work / "model", options.shape, seed=options.seed)
    write_data(work / "data", options.seed, num_demonstrations=39_000, num_prompts=40_000, num_heldout=256)
    done = quantise_folder(work / "model", work / "served")
    report.say(f"- model of {config.num_parameters:,} parameters, {done['num_tensors']} tensors with its scales")
    served = work / ("model" if choice.is_cpu else "served")
    server = Server(
        folder=served, log=work / "server.log", is_sglang=not choice.is_cpu, mem_fraction=0.2,
        extra=(*AS_LAUNCHED, *TRITON),
    )  # fmt: skip
    seed = f"run.seed={options.seed}"
    try:
        with running(server):
            imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}"], limit_s=300)
            watch.lap("supervised run")
            url = server.wait()
            watch.lap("waiting for the server")
            sets = [seed, 'algo.correction="tis"', attach_override(url), *overrides(choice, "")]
            if not choice.is_cpu:
                sets += [f'weights.served_folder="{served}"', 'weights.channel="cuda_ipc"']
            run_dir = up(work / "learn_colocated.toml", sets, limit_s=options.limit)
            watch.lap("reinforcement run")
    except (RunFailedError, ServerDiedError) as error:
        report.failed(str(error))
    run = read_run(run_dir)
    tell_run(report, "FP8 rollout, bfloat16 training", run, config)
    facts: dict[str, Any] = {
        name: run.column(f"train/{name}") for name in ("logprob_diff_abs_mean", "logprob_diff_abs_max")
    }
    for name, values in facts.items():
        if values:
            report.say(f"- {name}, mean of the steps: {sum(values) / len(values):.4f}")
    if not choice.is_cpu:
        compare_servers(report, work)
        watch.lap("servers of the 0.6B shape")
    report.goal("held-out reward at the end", run.evals[-1][1] if run.evals else None, at_least=REWARD)
    report.end()


if __name__ == "__main__":
    main()
