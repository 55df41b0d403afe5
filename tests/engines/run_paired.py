#!/usr/bin/env python3
"""A prefill and a decode server of a real SGLang as one engine, beside a regular server: the same answers.

    python tests/engines/run_paired.py --python .sglang-venv-0.5.17/bin/python

The interpreter needs SGLang and NIXL (`pip install nixl`); the servers run on the CPU. Tokens and log-probs of greedy
answers must be those of the regular server, those of drawn ones must be what it gives to the same tokens; answers go on
over a weight update; an abort ends both halves; a prefill server that is killed fails the engine. Needs no pytest; ends
with 0 when all of this holds, and also, with a loud line, when the packages are not there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.contract import CONTEXT, VOCAB, Result, ask, collect
from tests.engines.real_server import CPU_ENVIRONMENT, STANDINS
from tests.harness.manifests import manifest_of

from myxa.actors.engines.sglang.engine import SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, SglangLaunch
from myxa.actors.engines.sglang.paired import PairedSglang
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config.servers import GroupKind
from myxa.core.errors import EngineError

TABLE = {
    "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "mem_fraction_static": 0.05, "max_total_tokens": 8192, "disable_cuda_graph": True, "skip_server_warmup": True,
    "disable_overlap_schedule": True,
}  # fmt: skip
PAIR = {"disaggregation_transfer_backend": "nixl"}
CLOSE = 1e-4
LIMIT_S = 580.0


def server(kind: GroupKind, python: str, folder: Path, work: Path) -> LaunchedSglang:
    path = os.pathsep.join(filter(None, (str(STANDINS), os.environ.get("PYTHONPATH", ""))))
    launch = SglangLaunch(
        python=python, model_path=str(folder), table=TABLE | (PAIR if kind != "regular" else {}), dtype="float32",
        env=os.environ | CPU_ENVIRONMENT | {"PYTHONPATH": path}, log_path=work / f"{kind}.log", seed=1, num_devices=0,
        max_running=16, context_length=CONTEXT, kind=kind,
    )  # fmt: skip
    return LaunchedSglang(launch, SglangOptions(vocab_size=VOCAB, start_s=400, call_s=60, name=kind))


async def same(pair: PairedSglang, regular: LaunchedSglang, name: str) -> None:
    """Greedy answers are equal, and drawn ones have the log-probs that the regular server gives to them."""
    for at in range(3):
        asked = ask(f"{name}.{at}", 17 + 30 * at, max_new_tokens=24, temperature=0.0, ignore_eos=True)
        got, want = await asyncio.gather(collect(pair, asked), collect(regular, asked))
        assert got.ids.tolist() == want.ids.tolist(), f"{name}: other tokens"
        assert np.abs(got.logprobs - want.logprobs).max() < CLOSE, f"{name}: other log-probs"
        drawn = ask(f"{name}.drawn.{at}", 17 + 30 * at, max_new_tokens=24, ignore_eos=True)
        got = await collect(pair, drawn)
        body = {
            "input_ids": drawn.input_ids.tolist() + got.ids.tolist(), "return_logprob": True,
            "logprob_start_len": len(drawn.input_ids) - 1, "sampling_params": {"max_new_tokens": 1},
        }  # fmt: skip
        told = (await regular._http.post("/generate", body))["meta_info"]["input_token_logprobs"]
        scored = np.asarray([row[0] for row in told][-len(got.ids) :], np.float64)
        assert np.abs(scored - got.logprobs).max() < CLOSE, f"{name}: drawn tokens have other log-probs"
    print(f"holds: {name}", flush=True)


async def check(python: str, work: Path) -> None:
    folders = [work / f"version{number}" for number in range(2)]
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    prefill, decode, regular = (server(kind, python, folders[0], work) for kind in ("prefill", "decode", "regular"))
    pair = PairedSglang([prefill], [decode])
    try:
        await asyncio.gather(pair.start(), regular.start())
        await same(pair, regular, "answers are those of one server")
        over = [
            asyncio.ensure_future(collect(pair, ask(f"o{at}", 20, max_new_tokens=90, ignore_eos=True)))
            for at in range(20)
        ]
        await asyncio.sleep(1)
        for engine in (pair, regular):
            await engine.prepare_weights(manifest_of(1, folders[1]))
            await engine.commit_weights(1)
        ended: list[Result] = await asyncio.gather(*over)
        assert {(one.finish, len(one.ids)) for one in ended} == {("length", 90)}
        await same(pair, regular, "so are those of a new version, which comes while others are answered")
        long = [
            asyncio.ensure_future(collect(pair, ask(f"a{at}", 40, max_new_tokens=80, ignore_eos=True)))
            for at in range(6)
        ]
        await asyncio.sleep(0.3)
        await pair.abort()
        assert {one.finish for one in await asyncio.gather(*long)} <= {"abort", "length"}
        await same(pair, regular, "after an abort of all")
        lost = asyncio.ensure_future(pair.until_lost())
        dying = [
            asyncio.ensure_future(collect(pair, ask(f"k{at}", 60, max_new_tokens=40, ignore_eos=True)))
            for at in range(12)
        ]
        await asyncio.sleep(0.15)
        os.kill(prefill.memory_pids()[0], signal.SIGKILL)
        for one in await asyncio.gather(*dying, return_exceptions=True):
            assert isinstance(one, EngineError) or (isinstance(one, Result) and one.finish == "length"), one
        (noticed,) = await asyncio.gather(lost, return_exceptions=True)
        assert isinstance(noticed, EngineError), noticed
        print("holds: a killed server fails the engine, and no request is left without an end", flush=True)
    finally:
        await asyncio.gather(pair.close(), regular.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter that has SGLang and NIXL")
    python = parser.parse_args().python
    found = subprocess.run(
        [python, "-c", "from importlib.util import find_spec as f; assert f('sglang') and f('nixl')"],
        check=False,
        capture_output=True,
    )
    if found.returncode:
        print(f"NOT RUN: {python} has no SGLang, or no NIXL")
        return
    with tempfile.TemporaryDirectory() as work:
        try:
            asyncio.run(asyncio.wait_for(check(python, Path(work)), LIMIT_S))
        except BaseException:
            for log in Path(work).glob("*.log"):
                print(f"-- {log.name}\n{log.read_text(errors='replace')[-2500:]}")
            raise


if __name__ == "__main__":
    main()
