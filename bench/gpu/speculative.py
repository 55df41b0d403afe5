"""Tokens that SGLang guesses ahead: how many are taken, how fast it is, whether log-probs stay right, what a run does.

    python speculative.py [--sft-steps 250] [--cases "n-grams,MTP,nothing"] [--device cpu]

A toy of GLM-4.5's shape with its MTP layer imitates demonstrations (`learn.py`'s supervised run, `megatron.mtp`).
Servers of it start together: that layer guesses (NEXTN), n-grams guess, nothing does. Of each in turn: tokens a second
and tokens a pass on prompts of the task; a short reinforcement run without staleness (every step compares the engine's
log-probs with the trainer's; new weights, those of the layer too, come by cuda_ipc); the same prompts again. Then
servers of the 0.6B shape with and without n-grams, random weights: sampled text does not repeat itself, greedy text
does. On a CPU: a tiny Qwen3 and our own engine, which guesses nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from figures import Report, number
from make_model import make_apart, make_learner, random_weights
from run_figures import lines, read_run
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

from myxa.actors.models.hf_folder import read_config, write_folder
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.actors.models.tiny import END_ID, PAD_ID, write_tokenizer
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.samples import Message

TOY: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": END_ID, "pad_token_id": PAD_ID, "first_k_dense_replace": 1, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 512,
    "moe_intermediate_size": 192, "n_group": 1, "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 8, "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_qk_norm": True,
    "vocab_size": 320, "dtype": "float32", "torch_dtype": "float32",
}  # fmt: skip
NEXTN = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
if find_spec("deep_gemm") is None:  # which SGLang imports to capture graphs of the layer's passes
    NEXTN += ("--cuda-graph-backend-decode", "disabled")
CASES = {"n-grams": NGRAM, "MTP": NEXTN, "nothing": ()}
NUM_STEPS, MTP = 12, 0.3
AT_ONCE = 32
BOUND = 0.01
"""Of the mean difference of log-probs, above what it is without guesses."""


class Found(NamedTuple):
    """Of some requests."""

    tokens_per_s: float
    accepted_length: float | None
    """Tokens for each pass that judged guesses."""

    def cells(self) -> tuple[str, str]:
        return number(self.tokens_per_s), number(self.accepted_length)


async def asked(url: str, prompts: list[list[int]], params: dict[str, Any]) -> Found:
    """All prompts, AT_ONCE at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, ids: list[int]) -> tuple[int, int]:
        async with gate, session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": params}) as reply:
            reply.raise_for_status()
            meta = (await reply.json())["meta_info"]
            return int(meta["completion_tokens"]), int(meta.get("spec_verify_ct") or 0)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(one(session, ids) for ids in prompts[:AT_ONCE]))  # warm
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(session, ids) for ids in prompts))
        took_s = time.perf_counter() - began
    tokens, passes = (sum(column) for column in zip(*counts, strict=True))
    return Found(tokens / took_s, tokens / passes if passes else None)


def make_toy(folder: Path, seed: int) -> ModelConfig:
    config = parse_model_config(TOY, "toy of GLM-4.5")
    write_folder(folder, config.source, random_weights(config.with_mtp(), seed, "cpu", "float32"))
    write_tokenizer(folder, config)
    return config


def task_prompts(folder: Path, data: Path) -> list[list[int]]:
    """Held-out words, each eight times as in a group."""
    tokenizer = load_tokenizer(str(folder))
    words = [json.loads(line)["prompt"] for line in data.read_text().splitlines()[:64]]
    made = [tokenizer.render((Message(role="user", content=word),), add_generation_prompt=True) for word in words]
    return [ids for ids in made for _ in range(8)]


def of_run(run_dir: Path) -> tuple[str, str]:
    """Tokens a pass, first and last report of the rollout actor; mean difference of log-probs."""
    values = [point["values"] for point in lines(run_dir / "metrics.jsonl")]
    taken = [one["rollout/draft_accepted_length"] for one in values if "rollout/draft_accepted_length" in one]
    gaps = read_run(run_dir).column("train/logprob_diff_abs_mean")
    lengths = f"{taken[0]:.2f} to {taken[-1]:.2f}" if taken else "-"
    return lengths, number(sum(gaps) / len(gaps)) if gaps else "-"


def toy_server(name: str, choice: Choice, work: Path) -> Server:
    model, log = (work / "sft/export").resolve(), work / f"server_{name.replace(' ', '_')}.log"
    extra = ("--disable-shared-experts-fusion", "--max-total-tokens", "100000", *CASES[name])
    return server_for(choice, model, log, mem_fraction=0.8, max_running=64, extra=extra)


def one_case(
    name: str, server: Server, report: Report, choice: Choice, work: Path, seed: str, prompts: list[list[int]]
) -> tuple[str, ...]:
    """A server of the toy that loads: before, in and after a run. Raises what went wrong."""
    params = {"temperature": 1.0, "max_new_tokens": 16, "stop_token_ids": [END_ID]}
    url = server.wait()
    before = asyncio.run(asked(url, prompts, params))
    report.say(f"- {name}: {before.tokens_per_s:,.0f} tokens/s, {number(before.accepted_length)} tokens a pass")
    sets = [
        seed, attach_override(url), *overrides(choice, ""), "async.max_staleness=0", f"run.num_steps={NUM_STEPS}",
        "guard.bound=0.15",
        *(() if choice.is_cpu else ('weights.channel="cuda_ipc"',)),
        *((f"megatron.mtp={MTP}",) if CASES[name] == NEXTN else ()),
    ]  # fmt: skip
    try:
        lengths, gap = of_run(up(work / "learn_colocated.toml", sets, limit_s=90))
        after = asyncio.run(asked(url, prompts, params))
    except (RunFailedError, aiohttp.ClientError, TimeoutError) as error:
        report.say(f"- {name}, its run: {error!s:.3000}\n{server.last_words(1500)}")
        return (name, *before.cells(), "failed", "-", "-", "-")
    report.keep(name, {"before": before._asdict(), "after": after._asdict(), "lengths": lengths, "gap": gap})
    if CASES[name]:
        least = 1.5 if CASES[name] == NEXTN else 1.2
        report.goal(f"{name}: tokens a pass", before.accepted_length, at_least=least)
        report.goal(f"{name}: after {NUM_STEPS} updates", after.accepted_length, at_least=least)
    return (name, *before.cells(), lengths, gap, *after.cells())


def shape_rows(report: Report, name: str, server: Server, vocab_size: int) -> list[tuple[str, ...]]:
    """A server of the 0.6B shape that loads: sampled and greedy."""
    prompts = [[(at * 131 + place * 7) % vocab_size for place in range(64)] for at in range(64)]
    rows: list[tuple[str, ...]] = []
    try:
        url = server.wait()
        for temperature in (1.0, 0.0):
            params = {"temperature": temperature, "max_new_tokens": 128, "ignore_eos": True}
            found = asyncio.run(asked(url, prompts, params))
            rows.append((name, f"{temperature:g}", *found.cells()))
            report.say(f"- 0.6B shape, {name}, temperature {temperature:g}: {', '.join(found.cells())}")
    except (ServerDiedError, aiohttp.ClientError, TimeoutError) as error:
        rows.append((name, "-", "failed", "-"))
        report.say(f"- 0.6B shape, {name}: {type(error).__name__}: {error!s:.2500}\n{server.last_words(1500)}")
    finally:
        server.stop()
    return rows


def main() -> None:
    args = learner_parser(__doc__)
    args.add_argument("--cases", default=",".join(CASES), help="what guesses, with commas")
    args.set_defaults(backend="megatron", sft_steps=250)
    options, choice, report, work, watch = begun("speculative", args)
    shape = make_apart(work / "shape", "dry" if choice.is_cpu else "0.6b", options.device)
    if choice.is_cpu:
        choice = replace(choice, backend="torch")
        make_learner(work / "model", "0p5m", seed=options.seed)
    else:
        make_toy(work / "model", options.seed)
    prompts = task_prompts(work / "model", work / "data/heldout.jsonl")

    def shape_server(name: str, extra: tuple[str, ...]) -> Server:
        return Server(
            folder=work / "shape", log=work / f"shape_{name}.log", is_sglang=not choice.is_cpu, mem_fraction=0.8,
            max_running=64, context_length=0 if choice.is_cpu else 1024,
            extra=() if choice.is_cpu else (*extra, "--max-total-tokens", "100000"),
        )  # fmt: skip

    seed, rows, of_shape = f"run.seed={options.seed}", list[tuple[str, ...]](), list[tuple[str, ...]]()
    shapes = {"nothing": shape_server("plain", ())}
    if not choice.is_cpu:
        shapes["n-grams"] = shape_server("ngram", NGRAM)
    cases = ("nothing",) if choice.is_cpu else options.cases.split(",")
    with ExitStack() as all_of_them:
        for server in shapes.values():
            all_of_them.enter_context(running(server))
        try:
            mtp = () if choice.is_cpu else (f"megatron.mtp={MTP}",)
            imitated(choice, work, [seed, f"run.num_steps={options.sft_steps}", *mtp], limit_s=240)
        except RunFailedError as error:  # the random toy still says whether all of it runs
            report.say(f"- supervised run: {error!s:.3000}")
            (work / "sft").mkdir(exist_ok=True)
            (work / "sft/export").symlink_to(work / "model")
        watch.lap("supervised run")
        toys = {name: toy_server(name, choice, work) for name in cases}
        for server in toys.values():
            all_of_them.enter_context(running(server))
        for name, server in shapes.items():
            of_shape += shape_rows(report, name, server, shape.vocab_size)
        graphs = "without graphs: deep_gemm is not there" if "--cuda-graph-backend-decode" in NEXTN else "with graphs"
        report.say(f"- toy of {read_config(work / 'model').num_parameters:,} parameters; its layer guesses {graphs}")
        for name, server in toys.items():
            try:
                rows.append(one_case(name, server, report, choice, work, seed, prompts))
            except (ServerDiedError, aiohttp.ClientError, TimeoutError) as error:
                report.say(f"- {name}: {type(error).__name__}: {error!s:.3000}")
                rows.append((name, "failed", "-", "-", "-", "-", "-"))
            server.stop()
            watch.lap(name)
    gaps = {row[0]: float(row[4]) for row in rows if row[4] != "-"}
    for name in gaps.keys() - {"nothing"} if "nothing" in gaps else ():
        report.goal(f"{name}: log-probs farther away than without", gaps[name] - gaps["nothing"], at_most=BOUND)
    report.table(
        f"Toy of GLM-4.5's shape, {len(prompts)} requests of the task, {AT_ONCE} at once; {NUM_STEPS} steps between",
        ("guesses by", "tokens/s", "tokens a pass", "the same in the run", "log-prob difference", "tokens/s after",
         "tokens a pass after"), rows,
    )  # fmt: skip
    head = ("guesses by", "temperature", "tokens/s", "tokens a pass")
    report.table(f"0.6B shape, 64 requests of 64 + 128 tokens, {AT_ONCE} at once", head, of_shape)
    if any("failed" in row for row in (*rows, *of_shape)):
        report.failed("see the rows above")
    report.end()


if __name__ == "__main__":
    main()
