"""Servers of other shapes than one GPU each, as a run starts them: tokens a second, first token, a weight update.

    python topologies.py [--cases regular,dp_ep,pd] [--device cpu]

A toy mixture of experts (`routing.py`) on two GPUs: two regular servers; one server with attention in two replicas and
experts on two ranks; a prefill and a decode server. Each case takes a version of other weights by `cuda_ipc` from the
first GPU, then answers `--requests` long requests while one short request after the other asks for its first token.
Log-probs of its answers are compared with those that a regular server gives to the same tokens under the same version.
On a CPU fake servers answer, without weights: figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Report, number, parser, some_of, work_folder
from make_model import random_weights
from routing import make_folder
from trial_runs import HERE, stage
from weights_experts import Senders

from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.model_config import ModelConfig
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.actors.workflows.episode import joined
from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError, MyxaError
from myxa.core.messages import SamplingParams
from myxa.core.process import boot_id
from myxa.core.protocols import Engine, GenerateRequest
from myxa.launch.program import _engine as build_engine
from myxa.launch.supervisor.placement import place

CASES: dict[str, dict[str, Any]] = {
    "regular": {"roles.rollout.count": 2},
    "dp_ep": {"sglang.tp_size": 2, "sglang.dp_size": 2, "sglang.enable_dp_attention": True, "sglang.ep_size": 2},
    "pd": {
        "engine.groups.read.kind": "prefill", "engine.groups.write.kind": "decode",
        "sglang.disaggregation_transfer_backend": "nixl",
    },
}  # fmt: skip
"""Keys of the run file that make each case; all have two GPUs."""
SHARED = {
    "sglang.mem_fraction_static": 0.8, "sglang.max_total_tokens": 131072, "engine.max_running": 64,
    "engine.context_length": 4096, "sglang.cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
}  # fmt: skip
"""Servers of all cases are there at the same time: the cache is bounded by tokens."""
BOUND = 0.05
"""Of the mean difference of log-probs (nats): experts are summed in another order, and bfloat16 chooses others."""


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("'", '"') if isinstance(value, str | list | int | float) else str(value)


def config_of(case: str, work: Path, *, is_cpu: bool) -> RunConfig:
    keys: dict[str, Any] = {**CASES[case], "engine.python": sys.executable}
    if is_cpu:
        keys |= {"roles.rollout.devices": "cpu", "roles.trainer.devices": "cpu", "engine.dtype": "float32"}
        keys |= {"engine.max_running": 64, "engine.context_length": 4096}
    else:
        keys |= SHARED | {"roles.rollout.devices": "0,1", "weights.channel": "cuda_ipc"}
    return load_config(work / "async20.toml", [f"{key}={toml(value)}" for key, value in keys.items()])


def engines_of(config: RunConfig, model: ModelConfig, work: Path, senders: Any) -> list[Engine]:
    """Not started. Their processes see the GPUs that a launcher would show them."""
    made: list[Engine] = []
    for spec in place(config, 1):
        if spec.role == "rollout":
            before = os.environ.get("CUDA_VISIBLE_DEVICES")
            if spec.devices:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.devices))
            made.append(build_engine(spec, config, model, work, senders))
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
    return made


def request(name: str, rng: np.random.Generator, model: ModelConfig, num_prompt: int, num_new: int) -> GenerateRequest:
    ids = rng.integers(0, model.vocab_size, num_prompt, np.int32)
    return GenerateRequest(
        request_id=name, input_ids=ids, sampling=SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    )


async def answered(engine: Engine, asked: GenerateRequest) -> Any:
    return joined([delta async for delta in engine.generate(asked)])


async def load(engines: Sequence[Engine], model: ModelConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Long requests on all engines in turn, and one short request after the other."""
    rng, firsts = np.random.default_rng(3), list[float]()
    jobs = [request(f"l{at}", rng, model, options.prompt_tokens, options.num_new) for at in range(options.requests)]

    async def probe() -> None:
        for at in range(10**6):
            asked = request(f"p{at}", rng, model, options.prompt_tokens, 1)
            began = time.monotonic()
            await answered(engines[at % len(engines)], asked)
            firsts.append(time.monotonic() - began)
            await asyncio.sleep(0.01)

    began = time.monotonic()
    probing = asyncio.create_task(probe())
    try:
        whole = await asyncio.gather(*(answered(engines[at % len(engines)], one) for at, one in enumerate(jobs)))
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    wall_s = time.monotonic() - began
    num = sum(len(one.output_ids) for one in whole)
    assert all(len(one.output_ids) == options.num_new for one in whole)
    ordered = sorted(firsts) or [float("nan")]
    return {
        "rate": num / wall_s, "first_s": statistics.median(ordered), "first_95_s": ordered[int(0.95 * len(ordered))],
        "probes": len(firsts), "answers": [(j.input_ids.tolist(), o) for j, o in zip(jobs, whole, strict=True)][:16],
    }  # fmt: skip


async def gap(judge: Engine, answers: Sequence[tuple[list[int], Any]]) -> float:
    """Mean difference of log-probs between the answers' own and what the regular server gives to their tokens."""
    http: Any = judge._http  # pyright: ignore[reportAttributeAccessIssue]
    found: list[float] = []
    for prompt, whole in answers:
        body = {
            "input_ids": prompt + whole.output_ids.tolist(), "return_logprob": True,
            "logprob_start_len": len(prompt) - 1, "extra_key": f"judge{len(found)}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }  # fmt: skip
        told = (await http.post("/generate", body))["meta_info"]["input_token_logprobs"]
        theirs = [row[0] for row in told][-len(whole.output_ids) :]
        found += np.abs(np.asarray(theirs, np.float64) - whole.logprobs).tolist()
    return statistics.fmean(found)


class Sent:
    """The trainer's side: one process on the first GPU whose weights are made."""

    def __init__(self, config: ModelConfig) -> None:
        self.senders = Senders()
        self._sender = DeviceWeightSender("trainer/0", channel="cuda_ipc", bucket_bytes=2048 << 20, host=boot_id())
        self.senders.now = self._sender
        self.config = config

    def publish(self, version: int) -> Any:
        arrays = random_weights(self.config, version, "cuda", "bfloat16")

        def export() -> Any:
            for one in arrays:
                flat = torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
                yield one.spec.name, flat.view(torch.bfloat16).reshape(one.spec.shape).cuda()

        return self._sender.publish(version, export)

    def release(self, version: int) -> None:
        self._sender.release(version)


async def measure(report: Report, options: argparse.Namespace, work: Path, model: ModelConfig) -> dict[str, str]:
    """Cases that failed, and why."""
    is_cpu = options.device == "cpu"
    sent = None if is_cpu else Sent(model)
    stage(work, "async20.toml", "spread_reward.py", launches=not is_cpu)
    started: dict[str, list[Engine]] = {}
    async with AsyncExitStack() as stack:

        async def start(case: str) -> None:
            try:
                if case == "pd" and not is_cpu and importlib.util.find_spec("nixl") is None:
                    raise ConfigError("nixl is not here", remedy="unpack nixl.tar.xz beside SGLang")
                config = config_of(case, work, is_cpu=is_cpu)
                engines = engines_of(config, model, work / case, sent and sent.senders)
                for engine in engines:
                    stack.push_async_callback(engine.close)
                await asyncio.gather(*(engine.start() for engine in engines))
                started[case] = engines
            except MyxaError as error:
                told[case] = f"did not start: {error}"

        told: dict[str, str] = {}
        cases = options.cases.split(",")
        began = time.monotonic()
        await asyncio.gather(*map(start, cases))
        report.say(f"- servers of {len(started)} cases were ready after {time.monotonic() - began:.0f} s")
        rows = [await row_of(report, case, started, sent, told, options, model) for case in cases]
    head = ("case", "tokens/s", "first token, median s", "95 %", "update s", "log-prob gap", "the same, older weights")
    report.table(f"{options.requests} requests of {options.num_new} tokens, two GPUs", head, rows)
    return told


async def row_of(
    report: Report, case: str, started: dict[str, list[Engine]], sent: Sent | None, told: dict[str, str],
    options: argparse.Namespace, model: ModelConfig,
) -> tuple[str, ...]:  # fmt: skip
    """One case's line of the table; what goes wrong is told and leaves the others."""
    engines = started.get(case, [])
    try:
        if not engines:
            raise RuntimeError(told.get(case, "was not asked for"))
        found = await load(engines, model, options)  # warms up too
        judge, gaps = (started.get("regular") or [None])[0], [float("nan"), float("nan")]
        update_s = float("nan")
        if sent is not None:
            before = found["answers"]
            manifest = await asyncio.to_thread(sent.publish, 1)
            began = time.monotonic()
            for engine in engines:
                await engine.prepare_weights(manifest)
                await engine.commit_weights(1)
            update_s = time.monotonic() - began
            sent.release(1)
            found = await load(engines, model, options)
            assert all(set(one.versions.tolist()) == {1} for _, one in found["answers"])
            if judge is not None and (await judge.info()).version == 1:
                gaps = [await gap(judge, found["answers"]), await gap(judge, before)]
                report.goal(f"{case}: log-prob gap to a regular server", gaps[0], at_most=BOUND)
        report.keep(case, {name: found[name] for name in ("rate", "first_s", "first_95_s", "probes")} | {"gaps": gaps})
        figures = (found["rate"], found["first_s"], found["first_95_s"], update_s, *gaps)
        return (case, *(number(value) for value in figures))
    except (MyxaError, RuntimeError, AssertionError, TimeoutError) as error:
        told[case] = f"{type(error).__name__}: {error}"
        report.say(f"- {case} FAILED: {told[case]}")
        return (case, *["-"] * 6)


def refused(report: Report, work: Path) -> None:
    """What this machine's interpreter lacks is named by `myxa plan`."""
    if importlib.util.find_spec("deep_ep") is not None:
        report.say("- deep_ep is installed here: DeepEP is not refused")
        return
    keys = ["sglang.tp_size=2", "sglang.ep_size=2", "sglang.moe_a2a_backend=deepep", "roles.rollout.devices=0,1"]
    sets = [word for key in keys for word in ("--set", key)]
    command = [sys.executable, "-m", "myxa", "plan", "--device-gib", "140", *sets, str(work / "async20.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = next((line for line in (done.stdout + done.stderr).splitlines() if "deep_ep" in line), "")
    report.say(f"- DeepEP: {said.strip() or done.stdout[-300:] + done.stderr[-300:]}")
    report.goal(
        "DeepEP without deep_ep is refused by name (1 = yes)", float(bool(done.returncode and said)), at_least=1
    )


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--cases", default=",".join(CASES), type=some_of(CASES))
    args.add_argument("--requests", type=int, default=256)
    args.add_argument("--prompt-tokens", type=int, default=1024)
    args.add_argument("--num-new", type=int, default=256)
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report("topologies", is_dry=is_cpu)
    work = work_folder() / "topologies"
    if is_cpu:
        os.environ["PYTHONPATH"] = f"{HERE.parents[1] / 'tests/harness/stand_in'}:{os.environ.get('PYTHONPATH', '')}"
        os.environ["STAND_IN_LIGHT"] = "1"
    make_folder(work / "model", is_cpu=is_cpu)
    (work / "data").mkdir(exist_ok=True)
    (work / "data/prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    model = read_config(work / "model")
    told = asyncio.run(measure(report, options, work, model))
    if not is_cpu:
        refused(report, work)
    if told:
        report.tell_goals()
        report.failed("; ".join(f"{case} {why}" for case, why in told.items()))
    report.end()


if __name__ == "__main__":
    main()
