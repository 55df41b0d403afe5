"""Does replaying the engine's choice of experts bring trainer and engine together?

    python routing.py [--prompts 48] [--num-new 128] [--device cpu]

A server of a mixture of experts (Qwen3-30B-A3B's layers of 128 experts, 8 a token, at half its widths and 8 layers;
random weights, bfloat16) answers prompts of random tokens through the engine's client, which asks for the experts of
each token. Megatron scores prompt and answer twice: with its own choice, and with `megatron.routing_replay =
"rollout"`. Differences of the log-probs of all answered tokens. On a CPU a fake server tells tokens and experts by
their position, so figures mean nothing; all else is the same code.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from figures import Report, number, parser, work_folder
from logprob_gap import make_shard, scores_of
from make_model import random_weights, write_wide_tokenizer
from servers import Server, ServerDiedError, free_port, running
from trial_runs import stage
from weights_experts import MOE_30B

from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.models.hf_folder import read_config, write_folder
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.actors.workflows.episode import joined
from myxa.core.config import load_config
from myxa.core.errors import EngineError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import GenerateRequest
from myxa.launch.actor_spec import ActorSpec, RankSpec
from myxa.launch.program import build_actor

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests/backends")]

TOY: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384, "num_attention_heads": 16,
    "num_hidden_layers": 8, "max_window_layers": 8,
}  # fmt: skip
DRY: dict[str, Any] = TOY | {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_window_layers": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1024,
}  # fmt: skip
BOUND = 0.02
"""Of the mean difference with replay, as for models without experts in bfloat16 (`logprob_gap.py`)."""
FAR = 0.1
PROMPT_TOKENS = 64
MARK = "ROUTED "


def make_folder(folder: Path, *, is_cpu: bool) -> None:
    config = parse_model_config(MOE_30B | (DRY if is_cpu else TOY), "toy of Qwen3-30B-A3B")
    dtype, device = ("float32", "cpu") if is_cpu else ("bfloat16", "cuda")
    write_folder(folder, config.source, random_weights(config, 0, device, dtype))
    write_wide_tokenizer(folder, config)


@asynccontextmanager
async def fake_address(config: ModelConfig) -> AsyncIterator[str]:
    from tests.harness.fake_sglang import fake_sglang

    facts = {"context_length": 1024, "max_running_requests": 64, "enable_return_routed_experts": True}
    sizes = (config.num_layers, 0, config.experts_per_token, config.num_experts, 0)
    async with fake_sglang(facts=facts, experts=sizes, version="0", every_s=0.001) as server:
        yield server.url


async def answers_of(url: str, config: ModelConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One answer to each prompt, with the experts of all that was fed."""
    engine = SglangEngine(
        url, SglangOptions(vocab_size=config.vocab_size, context_length=1024, choices=config.expert_choices)
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, PROMPT_TOKENS, np.int32) for _ in range(options.prompts)]
    sampling = SamplingParams(max_new_tokens=options.num_new, ignore_eos=True)

    async def one(at: int, ids: Any) -> dict[str, Any]:
        request = GenerateRequest(request_id=f"r{at}", input_ids=ids, sampling=sampling)
        whole = joined([delta async for delta in engine.generate(request)])
        assert whole.experts is not None
        return {
            "prompt": ids.tolist(), "ids": whole.output_ids.tolist(), "logprobs": whole.logprobs.tolist(),
            "experts": whole.experts.tolist(),
        }  # fmt: skip

    await engine.start()
    try:
        return list(await asyncio.gather(*(one(at, ids) for at, ids in enumerate(prompts))))
    finally:
        await engine.close()


# -- the trainer's side, in a process of its own -----------------------------------------------------------------------


def score_main(options: argparse.Namespace) -> None:
    importlib.import_module("megatron_on_cpu").install()  # nothing where there is a GPU
    is_gpu = options.device == "cuda"
    gpu, devices = ("0", (0,)) if is_gpu else ("cpu", ())
    spec = ActorSpec(
        name="trainer/0", role="trainer", kind="megatron", index=0, node=0, devices=devices, visible_devices=devices,
        threads=4 if is_gpu else 1,
        rank=RankSpec(gang="trainer", rank=0, world_size=1, local_rank=0, local_world_size=1, group_rank=0),
    )  # fmt: skip
    replay = ['megatron.routing_replay="rollout"', "sglang.enable_return_routed_experts=true"]
    config = load_config(options.folder / "async20.toml", [
        f'trainer.dtype="{"bfloat16" if is_gpu else "float32"}"', 'algo.correction="none"',
        f'roles.trainer.devices="{gpu}"', f'roles.rollout.devices="{gpu}"', *(replay if options.replays else []),
    ])  # fmt: skip
    backend: Any = build_actor(spec, config, options.folder).backend  # pyright: ignore[reportAttributeAccessIssue]
    backend.setup()
    with closing(backend):
        answers = json.loads(options.answers.read_text())
        shard = make_shard(answers)
        told = [np.asarray(one["experts"], np.uint8) for one in answers]
        routed = [msgspec.structs.replace(s, experts=e) for s, e in zip(shard.samples, told, strict=True)]
        shard = msgspec.structs.replace(shard, samples=tuple(routed))
        scores = scores_of(backend._parts.stepper.policy, shard)
        gaps = np.concatenate([np.abs(mine - s.logprobs) for mine, s in zip(scores, shard.samples, strict=True)])
        found = {"num": gaps.size, "mean": gaps.mean(), "most": gaps.max(), "far": (gaps > FAR).mean()}
        print(MARK + json.dumps({name: float(value) for name, value in found.items()}), flush=True)
    os._exit(0)


def in_own_process(options: argparse.Namespace, *words: str, limit_s: float = 150) -> str:
    """What it says behind the mark. Raises RuntimeError with its last words."""
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4" if options.device == "cuda" else "1",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[1]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return next((line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)), "")


def answered(options: argparse.Namespace, work: Path, config: ModelConfig) -> list[dict[str, Any]]:
    if options.device == "cpu":

        async def from_fake() -> list[dict[str, Any]]:
            async with fake_address(config) as url:
                return await answers_of(url, config, options)

        return asyncio.run(from_fake())
    server = Server(
        folder=work / "model", log=work / "server.log", is_sglang=True, mem_fraction=0.2, max_running=64,
        context_length=1024, extra=("--enable-return-routed-experts", "--incremental-streaming-output"),
    )  # fmt: skip
    with running(server):
        try:
            return asyncio.run(answers_of(server.wait(options.start_limit), config, options))
        except EngineError as error:
            raise ServerDiedError(f"{error}\n{server.last_words()}") from error
        finally:
            server.stop()


def measure(options: argparse.Namespace) -> None:
    is_cpu = options.device == "cpu"
    report = Report("routing", is_dry=is_cpu)
    work = work_folder() / "routing"
    stage(work, "async20.toml", "spread_reward.py")
    rows: list[tuple[str, ...]] = []
    try:
        in_own_process(options, "--role", "make", "--folder", str(work / "model"))
        config = read_config(work / "model")
        answers = answered(options, work, config)
        place = work / "answers.json"
        place.write_text(json.dumps(answers))
        for name, words in (("its own choice", ()), ("the engine's choice", ("--replays",))):
            text = in_own_process(
                options, "--role", "score", "--folder", str(work), "--answers", str(place), *words
            )  # fmt: skip
            found = json.loads(text)
            rows.append((name, *(number(found[key]) for key in ("num", "mean", "most", "far"))))
            report.keep(name, found)
        replayed, own = json.loads(text), rows[0]
        report.say(f"- experts of {len(answers[0]['experts'])} tokens an answer; own choice: mean {own[2]}")
        report.goal("mean difference with the engine's experts", replayed["mean"], at_most=BOUND)
    except (RuntimeError, EngineError, subprocess.TimeoutExpired) as error:
        report.failed(f"{type(error).__name__}: {error}")
    head = ("the trainer's experts", "tokens", "engine/trainer mean", "largest", f"share above {FAR}")
    report.table("Differences of log-probs, a mixture of experts", head, rows)
    report.end()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--prompts", type=int, default=48)
    args.add_argument("--num-new", type=int, default=128)
    args.add_argument("--start-limit", type=float, default=150.0, help="seconds that a server may take to load")
    args.add_argument("--role", choices=("measure", "make", "score"), default="measure", help=argparse.SUPPRESS)
    args.add_argument("--replays", action="store_true", help=argparse.SUPPRESS)
    args.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.role == "make":
        make_folder(options.folder, is_cpu=options.device == "cpu")
    elif options.role == "score":
        score_main(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
