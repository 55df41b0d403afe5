"""Where two equal runs part: the parts of one, each alone and twice.

    python repeats_probe.py [--part trainer|engine] [--device cpu]

`trainer`: two processes make the same steps from the same samples; digests of the weights after each. `engine`: one
server answers the same seeded requests together, together in another order and at other times, and one by one; answers
and log-probs are compared. Both with the settings of `repeats.toml`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from figures import Report, parser, work_folder
from make_model import make_learner
from servers import Server, free_port, running
from trial_runs import cpu_overrides, stage

from myxa.core.config import load_config
from myxa.core.samples import TrainSample, TrainShard
from myxa.launch.actor_spec import ActorSpec, RankSpec
from myxa.launch.program import build_actor

RUN_FILE = "repeats.toml"
MARK = "DIGESTS "
NUM_STEPS, NUM_SAMPLES, NUM_ALONE = 6, 128, 12
SERVER_FLAGS = (
    "--enable-deterministic-inference", "--disable-radix-cache", "--disable-cuda-graph", "--skip-server-warmup",
    "--max-total-tokens", "32768",
)  # fmt: skip


# -- the trainer


def make_shard(step: int) -> TrainShard:
    rng = np.random.default_rng(step)
    lengths = rng.integers(2, 25, NUM_SAMPLES)
    samples = tuple(
        TrainSample(
            group_id=index // 8,
            index=index % 8,
            prompt_ids=rng.integers(0, 320, 12).astype(np.int32),
            response_ids=rng.integers(0, 320, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=np.uint8),
            logprobs=np.full(length, -5.7, dtype=np.float32),
            versions=np.full(length, step, dtype=np.int32),
            finish="stop",
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(lengths)
    )
    halves = tuple(tuple(range(first, first + NUM_SAMPLES // 2)) for first in (0, NUM_SAMPLES // 2))
    return TrainShard(
        step=step,
        samples=samples,
        minibatches=tuple((half,) for half in halves),
        minibatch_tokens=tuple(float(sum(lengths[i] for i in half)) for half in halves),
        minibatch_rollouts=tuple(float(len(half)) for half in halves),
    )


def train(options: argparse.Namespace) -> None:
    """In a process of its own; prints digest after digest, as a dictionary of parameters."""
    is_gpu = options.device == "cuda"
    sets = [] if is_gpu else [*cpu_overrides(), 'roles.rollout.kind="embedded"', 'roles.rollout.devices="cpu"',
                              'roles.trainer.kind="torch"', 'engine.dtype="float32"']  # fmt: skip
    config = load_config(options.folder / RUN_FILE, [*sets, "run.num_steps=30"])
    devices = (0,) if is_gpu else ()
    spec = ActorSpec(
        name="trainer/0", role="trainer", kind=config.roles.trainer.kind, index=0, node=0, devices=devices,
        visible_devices=devices, threads=4 if is_gpu else 1,
        rank=RankSpec(gang="trainer", rank=0, world_size=1, local_rank=0, local_world_size=1, group_rank=0),
    )  # fmt: skip
    backend: Any = build_actor(spec, config, options.folder).backend  # pyright: ignore[reportAttributeAccessIssue]
    backend.setup()
    digests: list[dict[str, str]] = []
    for step in range(NUM_STEPS):
        backend.train(make_shard(step), {})
        digests.append(
            {
                name: hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
                for name, tensor in backend.export_device()
            }
        )
    print(MARK + json.dumps(digests), flush=True)
    os._exit(0)


def compare_trainers(options: argparse.Namespace, report: Report) -> bool:
    found: list[list[dict[str, str]]] = []
    for number in range(2):
        base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0",
                "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}  # fmt: skip
        command = [sys.executable, __file__, "--device", options.device, "--trains", "--folder", str(options.folder)]
        log = options.folder / f"trains{number}.log"
        done = subprocess.run(command, env=base, capture_output=True, text=True, timeout=200, check=False)
        log.write_text(done.stdout + done.stderr)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            report.failed(f"trainer {number} ended with {done.returncode}: {log.read_text()[-1500:]}")
            return False
        found.append(json.loads(lines[0].removeprefix(MARK)))
    for step, (one, other) in enumerate(zip(*found, strict=True)):
        names = [name for name in one if one[name] != other[name]]
        report.say(f"- trainer, step {step}: {len(names)} of {len(one)} tensors differ {names[:5]}")
    return found[0] == found[1]


# -- the engine


def make_requests() -> list[dict[str, Any]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(8, 20))] for _ in range(NUM_SAMPLES // 8)]
    return [
        {
            "input_ids": prompts[index // 8],
            "sampling_params": {
                "temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 1000 + index, "stop_token_ids": [97, 98, 99],
            },
            "return_logprob": True,
            "stream": False,
        }
        for index in range(NUM_SAMPLES)
    ]  # fmt: skip


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], delay_s: float = 0.0
) -> list[list[float]]:
    await asyncio.sleep(delay_s)
    async with session.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        told = await answer.json()
    return [[logprob, token] for logprob, token, *_ in told["meta_info"]["output_token_logprobs"]]


async def answers_of(url: str, report: Report) -> bool:
    requests = make_requests()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
        await ask(session, url, requests[0])  # the first one compiles
        first = await asyncio.gather(*(ask(session, url, body) for body in requests))
        rng = random.Random(6)
        order = list(range(NUM_SAMPLES))
        rng.shuffle(order)
        shuffled = await asyncio.gather(*(ask(session, url, requests[i], rng.random() * 0.5) for i in order))
        back = dict(zip(order, shuffled, strict=True))
        alone = [await ask(session, url, body) for body in requests[:NUM_ALONE]]
        again = await asyncio.gather(*(ask(session, url, body) for body in requests))
    is_equal = True
    for name, other in (("another order", [back[i] for i in range(NUM_SAMPLES)]), ("alone", alone), ("again", again)):
        different = [i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b]
        is_equal &= not different
        report.say(f"- engine, {name}: {len(different)} of {len(other)} answers differ")
        for index in different[:4]:
            a, b = first[index], other[index]
            place = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            both = f"{a[place : place + 2]} {b[place : place + 2]}"
            report.say(f"    request {index} at token {place} of {len(a)} and {len(b)}: {both}")
    return is_equal


def compare_engines(options: argparse.Namespace, report: Report) -> bool:
    is_sglang = options.device == "cuda"
    server = Server(
        folder=options.folder / "model", log=options.folder / "server.log", is_sglang=is_sglang, mem_fraction=0.2,
        max_running=128, context_length=128, extra=SERVER_FLAGS if is_sglang else (),
    )  # fmt: skip
    with running(server):
        return asyncio.run(answers_of(server.wait(), report))


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--part", choices=("trainer", "engine", "both"), default="both")
    args.add_argument("--trains", action="store_true", help=argparse.SUPPRESS)
    args.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.trains:
        train(options)
    is_cpu = options.device == "cpu"
    report = Report("repeats_probe", is_dry=is_cpu)
    options.folder = work_folder() / "probe"
    stage(options.folder, RUN_FILE, launches=not is_cpu)
    make_learner(options.folder / "model", "0p5m" if is_cpu else "20m", seed=0)
    (options.folder / "prompts.jsonl").write_text('{"prompt": "say 1", "label": ""}\n')
    (options.folder / "judged.py").write_text(
        "def reward(completion):\n    return 0.0\n\n\ndef record(groups):\n    return [g.rewards for g in groups]\n"
    )
    parts = {"trainer": compare_trainers, "engine": compare_engines}
    different = [
        name for name, compare in parts.items() if options.part in (name, "both") and not compare(options, report)
    ]
    if different:
        report.failed(f"{' and '.join(different)} did not repeat")
    report.end()


if __name__ == "__main__":
    main()
