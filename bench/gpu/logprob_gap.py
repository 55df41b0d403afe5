"""Do engine and trainer agree, token by token? And does the trainer agree with itself?

    python logprob_gap.py [--shape 0.6b | --model FOLDER] [--backends torch,megatron] [--prompts 48] [--device cpu]

One server a number type (bf16 with the kernels of a run, float32 with batch-invariant ones, since SGLang's usual norm
takes none) answers the same prompts of random tokens; each of our backends then scores prompt and answer in the same
number type, temperature 1. Mean and largest absolute difference of the log-probs of all answered tokens. Then the
trainer against itself: log-probs of a shard by a separate forward in the layout of the training step are given to the
step as behaviour log-probs; the KL that its own first forward finds must be exactly 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from figures import Report, number, parser, work_folder
from make_model import make_apart
from servers import Server, ServerDiedError, free_port, running
from trial_runs import stage

from myxa.actors.models.hf_folder import read_config
from myxa.core.config import load_config
from myxa.core.samples import TrainSample, TrainShard
from myxa.launch.actor_spec import ActorSpec, RankSpec
from myxa.launch.program import build_actor

BOUNDS = {"bfloat16": 0.02, "float32": 1e-4}
FOR_FLOAT32 = ("--enable-deterministic-inference", "--cuda-graph-backend-decode", "disabled")
"""SGLang's usual norm kernel takes no float32, the batch-invariant one does."""
EXACT_TRITON = {"TRITON_F32_DEFAULT": "ieee"}
"""Else Triton's matrix products round float32 to TF32."""
PROMPT_TOKENS = 64
PER_PASS = 16
MARK = "SCORES "


# -- the engine's side -------------------------------------------------------------------------------------------------


async def answer(url: str, prompts: list[list[int]], num_new: int) -> list[dict[str, list[Any]]]:
    """Tokens and log-probs of one answer to every prompt."""
    headers = {"Content-Type": "application/json"}
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": num_new, "ignore_eos": True}

    async def one(session: aiohttp.ClientSession, ids: list[int]) -> dict[str, list[Any]]:
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        async with session.post(f"{url}/generate", data=json.dumps(body), headers=headers) as reply:
            reply.raise_for_status()
            pairs = (await reply.json())["meta_info"]["output_token_logprobs"]
        return {"prompt": ids, "ids": [int(p[1]) for p in pairs], "logprobs": [float(p[0]) for p in pairs]}

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        return list(await asyncio.gather(*(one(session, ids) for ids in prompts)))


# -- the trainer's side ------------------------------------------------------------------------------------------------


def make_shard(answers: list[dict[str, list[Any]]], logprobs: list[np.ndarray] | None = None) -> TrainShard:
    samples = tuple(
        TrainSample(
            group_id=number_ // 8,
            index=number_ % 8,
            prompt_ids=np.asarray(one["prompt"], dtype=np.int32),
            response_ids=np.asarray(one["ids"], dtype=np.int32),
            loss_mask=np.ones(len(one["ids"]), dtype=np.uint8),
            logprobs=np.asarray(one["logprobs"], dtype=np.float32) if logprobs is None else logprobs[number_],
            versions=np.zeros(len(one["ids"]), dtype=np.int32),
            finish="stop",
            advantage=1.0 if number_ % 2 else -1.0,
        )
        for number_, one in enumerate(answers)
    )
    cuts = tuple(tuple(range(k, min(k + PER_PASS, len(samples)))) for k in range(0, len(samples), PER_PASS))
    num_tokens, num_samples = float(sum(len(s.loss_mask) for s in samples)), float(len(samples))
    return TrainShard(
        step=0,
        samples=samples,
        minibatches=(cuts,),
        minibatch_tokens=(num_tokens,),
        minibatch_rollouts=(num_samples,),
    )


def score_sets(options: argparse.Namespace) -> list[str]:
    """What the run file is told besides."""
    gpu = "0" if options.device == "cuda" else "cpu"
    return [
        f'roles.trainer.kind="{options.backend}"', f'trainer.dtype="{options.dtype}"', 'algo.correction="none"',
        "trainer.max_tokens_per_microbatch=16384", 'roles.rollout.kind="embedded"', 'roles.rollout.devices="cpu"',
        f'roles.trainer.devices="{gpu}"', *options.sets,
    ]  # fmt: skip


def scores_of(policy: Any, shard: TrainShard) -> list[Any]:
    """Log-probs of the shard's samples by the passes that training makes; every token is a loss token."""
    scores: dict[int, Any] = {}
    for layouts in ([m.layout for m in micros] for micros in policy.cut(shard, skips_neutral=False)):
        for layout, found in zip(layouts, policy.score(layouts), strict=True):
            rows = np.split(found.logprobs_M.float().cpu().numpy(), layout.offsets[1:-1])
            scores.update(zip(layout.members, rows, strict=True))
    return [scores[i] for i in range(len(shard.samples))]


def score_main(options: argparse.Namespace) -> None:
    """One backend, one number type: differences as a line on stdout."""
    answers = json.loads(options.answers.read_text())
    is_gpu = options.device == "cuda"
    devices = (0,) if is_gpu else ()
    spec = ActorSpec(
        name="trainer/0", role="trainer", kind=options.backend, index=0, node=0, devices=devices,
        visible_devices=devices, threads=4 if is_gpu else 1,
        rank=RankSpec(gang="trainer", rank=0, world_size=1, local_rank=0, local_world_size=1, group_rank=0),
    )  # fmt: skip
    config = load_config(options.folder / "async20.toml", score_sets(options))
    backend: Any = build_actor(spec, config, options.folder).backend  # pyright: ignore[reportAttributeAccessIssue]
    backend.setup()
    shard = make_shard(answers)
    scores = scores_of(backend._parts.stepper.policy, shard)
    gaps = np.concatenate([np.abs(mine - s.logprobs) for mine, s in zip(scores, shard.samples, strict=True)])
    found = {"mean": float(gaps.mean()), "most": float(gaps.max()), "num": int(gaps.size)}
    own = make_shard(answers, scores)
    metrics = backend.train(own, {}).metrics
    found["own_kl"] = float(metrics["train/approx_kl"])
    found["own_most"] = float(metrics["train/logprob_diff_abs_max"])
    print(MARK + json.dumps(found), flush=True)
    backend.close()
    os._exit(0)


def score(options: argparse.Namespace, folder: Path, answers: Path, backend: str, dtype: str) -> dict[str, float] | str:
    command = [
        sys.executable, str(Path(__file__).resolve()), "--device", options.device, "--role", "score", "--backend",
        backend, "--dtype", dtype, "--folder", str(folder), "--answers", str(answers), "--sets", *options.sets,
    ]  # fmt: skip
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4" if options.device == "cuda" else "1",
    }  # fmt: skip
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        return "not done within 90 s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return f"ended with {done.returncode}: {done.stderr[-800:]}"


def server_of(options: argparse.Namespace, work: Path, dtype: str) -> Server:
    """Of one number type."""
    is_cpu = options.device == "cpu"
    is_exact = dtype == "float32" and not is_cpu
    return Server(
        folder=work / "model",
        log=work / f"server_{dtype}.log",
        is_sglang=not is_cpu,
        dtype=dtype,
        mem_fraction=options.mem_fraction,
        max_running=64,
        context_length=0 if is_cpu else 1024,
        extra=FOR_FLOAT32 if is_exact else (),
        env=EXACT_TRITON if is_exact else {},
    )


def measure(options: argparse.Namespace) -> None:
    is_cpu = options.device == "cpu"
    started_s = time.monotonic()

    def watch_s() -> float:
        return time.monotonic() - started_s

    report = Report("logprobs", is_dry=is_cpu)
    work = work_folder() / "logprobs"
    stage(work, "async20.toml", "spread_reward.py")
    if options.model:
        (work / "model").symlink_to(options.model.absolute())
        config = read_config(options.model)
    else:
        config = make_apart(work / "model", "dry" if is_cpu else options.shape, options.device)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, PROMPT_TOKENS).tolist() for _ in range(options.prompts)]
    dtypes = ["float32"] if is_cpu else options.dtypes.split(",")
    rows: list[tuple[str, ...]] = []
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        next_server: Server | None = None
        for dtype, later in zip(dtypes, [*dtypes[1:], None], strict=True):
            server = next_server or stack.enter_context(running(server_of(options, work, dtype)))
            try:
                url = server.wait(options.start_limit)
                # The next one loads while the trainer scores; not earlier: servers that load at the same time take
                # each other's memory away.
                next_server = stack.enter_context(running(server_of(options, work, later))) if later else None
                answers = asyncio.run(answer(url, prompts, options.num_new))
            except (ServerDiedError, aiohttp.ClientError, TimeoutError) as error:
                failures.append(f"{dtype}: {type(error).__name__}: {error}\n{server.last_words(800)}")
                continue
            finally:
                server.stop()
            report.say(f"- {dtype}: {len(answers)} answers after {watch_s():.0f} s")
            path = work / f"answers_{dtype}.json"
            path.write_text(json.dumps(answers))
            for backend in options.backends.split(","):
                found = score(options, work, path, backend, dtype)
                if isinstance(found, str):
                    failures.append(f"{backend} {dtype}: {found}")
                    continue
                report.say(f"- {backend}, {dtype}, {watch_s():.0f} s: mean difference {number(found['mean'])}")
                columns = ("num", "mean", "most", "own_kl", "own_most")
                rows.append((f"{backend}, {dtype}", *(number(found.get(name)) for name in columns)))
                report.keep(f"{backend} {dtype}", found)
                report.goal(f"{backend} {dtype}: mean difference", found["mean"], at_most=BOUNDS[dtype])
                if "own_kl" in found:
                    report.goal(f"{backend} {dtype}: KL of the first step", abs(found["own_kl"]), at_most=0.0)
    head = ("trainer", "tokens", "engine/trainer mean", "largest", "trainer with itself: KL", "largest difference")
    report.table("Differences of log-probs", head, rows)
    if failures:
        report.failed("\n".join(failures))
    report.end()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--model", type=Path, help="a folder with a tokenizer, in place of a shape")
    args.add_argument("--backends", default="torch")
    args.add_argument("--dtypes", default="bfloat16,float32")
    args.add_argument("--prompts", type=int, default=48)
    args.add_argument("--num-new", type=int, default=128)
    args.add_argument("--start-limit", type=float, default=110.0, help="seconds that a server may take to load")
    args.add_argument("--mem-fraction", type=float, default=0.15)
    args.add_argument("--sets", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    args.add_argument("--role", choices=("measure", "score"), default="measure", help=argparse.SUPPRESS)
    args.add_argument("--backend", default="", help=argparse.SUPPRESS)
    args.add_argument("--dtype", default="", help=argparse.SUPPRESS)
    args.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.role == "score":
        score_main(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
