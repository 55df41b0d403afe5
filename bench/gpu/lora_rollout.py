"""Adapters that SGLang holds, against merged weights: learning, log-probs, updates, tokens a second.

    python lora_rollout.py [--backend torch|megatron] [--shape 20m] [--device cpu]

The runs of `learn.py` with `lora.rank = 16`, once with each `lora.rollout`, each attached to a server of its own, from
the same imitated model. Then servers of the 0.6B shape, one that holds adapters and one that does not: tokens/s, and
what it takes to load an adapter. Servers start at once, beside the imitation; the one whose adapters are learnt starts
with the model that this makes, beside the first run. `--device cpu`: merged weights alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from figures import Report
from fp8_speed import generated
from make_model import make_apart, make_learner
from run_figures import read_run, tell_run
from servers import Server, ServerDiedError, running
from trial_runs import (
    Choice,
    RunFailedError,
    attach_override,
    begun,
    imitated,
    learner_parser,
    overrides,
    server_for,
    up,
)

from myxa.actors.backends.rank_backend import named_arrays
from myxa.actors.models.adapters import adapted_matrices, adapter_shapes, file_name, num_adapted, write_adapter
from myxa.actors.models.model_config import ModelConfig
from myxa.core.config import LoraConfig

RANK = 16
LORA = LoraConfig(rank=RANK)
REWARD = 0.75
LEARNING = (f"lora.rank={RANK}", "optimizer.lr=2e-3", "run.max_wall_s=90")
ROUNDS = 5


def holds_adapters(config: ModelConfig) -> tuple[str, ...]:
    """Arguments of a server that does."""
    ends = {name.rpartition(".")[2] for name in adapted_matrices(LORA, config.tensor_shapes())}
    return (
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--lora-target-modules",
        *sorted(ends),
        "--weight-version",
        "x",
    )


def write_random(folder: Path, config: ModelConfig) -> int:
    """An adapter folder of random numbers; their bytes."""
    shapes = adapter_shapes(RANK, adapted_matrices(LORA, config.tensor_shapes()))
    arrays = named_arrays((file_name(name), torch.randn(shape).bfloat16() * 0.01) for name, shape in shapes.items())
    write_adapter(folder, "", {"rank": RANK, "alpha": LORA.alpha}, arrays)
    return sum(one.spec.num_bytes for one in arrays)


def asked(url: str, route: str, body: dict[str, Any]) -> float:
    """Seconds that the server takes for it."""
    data, began = json.dumps(body).encode(), time.perf_counter()
    request = urllib.request.Request(f"{url}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began


def learn(
    report: Report, choice: Choice, work: Path, config: ModelConfig, seed: str, name: str, server: Server
) -> float:
    """One run; its reward at the end."""
    sets = [seed, *LEARNING, f'lora.rollout="{name}"', attach_override(server.wait()), *overrides(choice, "")]
    run = read_run(up(work / "learn_colocated.toml", sets, limit_s=150))
    tell_run(report, "engines get merged weights" if name == "merged" else "engines get adapters", run, None)
    values = run.column("train/logprob_diff_abs_mean")
    report.say(f"- {name}: engine/trainer log-prob difference, mean of the steps: {statistics.fmean(values):.4f}")
    numbers = num_adapted(LORA, config) if name == "adapter" else config.num_parameters
    report.say(f"- {name}: bytes of a version in bfloat16: {2 * numbers:,}")
    return run.evals[-1][1] if run.evals else 0.0


def speed(
    report: Report, config: ModelConfig, folder: Path, plain: Server, holding: Server, num: tuple[int, int]
) -> None:
    """Tokens/s of both, and the seconds that loading takes."""
    rows = [
        ("merged weights, a server without adapters", asyncio.run(generated(plain.wait(), config.vocab_size, *num)))
    ]
    url, num_bytes = holding.wait(), write_random(folder, config)
    rows.append(("no adapter, a server that may hold some", asyncio.run(generated(url, config.vocab_size, *num))))
    names = [f"random.{number}" for number in range(ROUNDS)]
    loads = [asked(url, "load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}) for name in names]
    rates = asyncio.run(generated(url, config.vocab_size, *num, adapters=names[:1]))
    rows.append(("an adapter", rates))
    mixed = asyncio.run(generated(url, config.vocab_size, *num, adapters=names[:2]))
    rows.append(("two adapters, half of the requests each", mixed))
    unloads = [asked(url, "unload_lora_adapter", {"lora_name": name}) for name in names]
    shown = [(name, f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})") for name, rates in rows]
    report.table(
        f"0.6B shape, {num[0]} requests of 64 + {num[1]} tokens at once: median (range)", ("", "tokens/s"), shown
    )
    report.say(
        f"- an adapter of {num_bytes:,} bytes: loaded in {statistics.median(loads):.3f} s (at most {max(loads):.3f}), "
        f"unloaded in {statistics.median(unloads):.3f} s"
    )
    report.keep("speed", {"rates": dict(rows), "loads_s": loads, "unloads_s": unloads, "bytes": num_bytes})


def main() -> None:
    options, choice, report, work, watch = begun("lora_rollout", learner_parser(__doc__))
    small = make_learner(work / "model", options.shape, seed=options.seed)
    large = make_apart(work / "large", "dry" if choice.is_cpu else "0.6b", options.device)
    kinds = {"merged": ("model", ()), "plain": ("large", ()), "holding": ("large", holds_adapters(large)),
             "adapter": ("sft/export", holds_adapters(small))}  # fmt: skip
    seed, rewards, failures = f"run.seed={options.seed}", dict[str, float](), list[str]()
    with ExitStack() as all_of_them:
        servers: dict[str, Server] = {}
        for name, (folder, extra) in kinds.items() if not choice.is_cpu else [("merged", kinds["merged"])]:
            length = 1024 if folder == "large" and not choice.is_cpu else 0
            servers[name] = server_for(
                choice, work / folder, work / f"{name}.log", mem_fraction=0.8, context_length=length,
                graph_sizes=(32, 128, 256), extra=("--max-total-tokens", "100000", *extra),
            )  # fmt: skip
            if name != "adapter":
                all_of_them.enter_context(running(servers[name]))
        try:
            imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}"], limit_s=300)
            watch.lap("supervised run")
        except RunFailedError as error:
            report.failed(str(error))
        if "adapter" in servers:
            all_of_them.enter_context(running(servers["adapter"]))
        for name in ("merged", "adapter"):
            try:
                if name in servers:
                    rewards[name] = learn(report, choice, work, small, seed, name, servers[name])
            except (RunFailedError, ServerDiedError) as error:
                failures.append(f"{name}: {error!s:.1500}")
            watch.lap(f"run with {name}")
        try:
            if "plain" in servers:
                speed(report, large, work / "random", servers["plain"], servers["holding"], (256, 256))
        except (OSError, ServerDiedError) as error:
            failures.append(f"speed: {error!s:.1500}\n{servers['holding'].last_words(600)}")
        watch.lap("speed")
    for name, reward in rewards.items():
        report.goal(f"held-out reward at the end, {name}", reward, at_least=REWARD)
    if failures:
        report.failed("\n".join(failures))
    report.end()


if __name__ == "__main__":
    main()
