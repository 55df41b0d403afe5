"""Tokens per second of the embedded engine against transformers' `generate` and its continuous batching.

    python bench/engine.py [--presets 1m,5m] [--rows 64] [--rounds 7] [--out FILE]

Same model folder, same prompts, same number of tokens, log-probs on, temperature 1, float32, one thread, one process.
After a warm-up all take turns round by round, so that a noisy machine is noisy for all; medians of rounds are
compared, by the wall clock and by CPU seconds of the process. Two loads:

    equal       every answer has the same length: the best case for `generate`, which decodes a rectangle
    long tail   lognormal lengths (median 24, sigma 1, at most 192), four answers for every row (a training step of 32
                prompts times 8 on 64 rows): `generate` pays the longest answer of each batch, the others refill rows

Only tokens that were asked for count. Goals: 1.5 times `generate` and 3 times continuous batching on both loads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.messages import SamplingParams
from myxa.core.protocols import GenerateRequest

PROMPT_TOKENS = 32
EQUAL_TOKENS = 96
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 24, 1.0, 192
CONTEXT = 256
PAGE_TOKENS = 32
CB_BATCH_TOKENS = 1024
WAIT_S = 300.0
GOALS = {"transformers generate": 1.5, "transformers continuous batching": 3.0}


@dataclass(frozen=True)
class Load:
    """Requests: prompts and how many tokens each wants."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def make_loads(num_rows: int, seed: int) -> list[Load]:
    rng = np.random.default_rng(seed)

    def prompts(count: int) -> list[list[int]]:
        return rng.integers(0, 256, (count, PROMPT_TOKENS)).tolist()

    tail = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, 4 * num_rows), 1, MAX_TOKENS).astype(int).tolist()
    return [
        Load("equal", prompts(num_rows), [EQUAL_TOKENS] * num_rows),
        Load("long tail", prompts(4 * num_rows), tail),
    ]


class Embedded:
    """Ours, through its asyncio face, in the thread it has in production."""

    def __init__(self, folder: Path, num_rows: int, *, is_invariant: bool = False) -> None:
        self.name = "myxa embedded, rollout.deterministic" if is_invariant else "myxa embedded"
        self._loop = asyncio.new_event_loop()
        options = EmbeddedOptions(max_running=num_rows, context_length=CONTEXT, is_invariant=is_invariant)
        self._engine = EmbeddedEngine(folder, options)
        self._loop.run_until_complete(self._engine.start())
        self._num_calls = 0

    def run(self, load: Load) -> None:
        self._loop.run_until_complete(self._all(load))

    async def _all(self, load: Load) -> None:
        await asyncio.gather(*(self._one(p, n) for p, n in zip(load.prompts, load.lengths, strict=True)))

    async def _one(self, prompt: list[int], length: int) -> None:
        self._num_calls += 1
        request = GenerateRequest(
            request_id=str(self._num_calls),
            input_ids=np.asarray(prompt, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=length, ignore_eos=True),
        )
        count = 0
        async for delta in self._engine.generate(request):
            count += len(delta.logprobs)
        check(count, length)

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


class Generate:
    """`model.generate` in batches of the same number of rows, log-probs from its logits."""

    name = "transformers generate"

    def __init__(self, model: Any, num_rows: int) -> None:
        self._model = model
        self._num_rows = num_rows

    @torch.inference_mode()
    def run(self, load: Load) -> None:
        for first in range(0, len(load.prompts), self._num_rows):
            part = slice(first, first + self._num_rows)
            longest = max(load.lengths[part])
            config = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, min_new_tokens=longest,
                pad_token_id=256, eos_token_id=257, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            ids = torch.tensor(load.prompts[part])
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            drawn = out.sequences[:, PROMPT_TOKENS:]
            logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(2, drawn[..., None])
            check(logprobs.shape[1], longest)

    def close(self) -> None:
        return


class Continuous:
    """transformers' continuous batching; its manager is started before and stopped after each timed round."""

    name = "transformers continuous batching"

    def __init__(self, model: Any, num_rows: int) -> None:
        self._model = model
        self._generation = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS,
            pad_token_id=256, eos_token_id=-1,
        )  # fmt: skip
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=num_rows * CONTEXT // PAGE_TOKENS,
            max_batch_tokens=CB_BATCH_TOKENS,
            use_cuda_graph=False,
            use_async_batching=False,
            return_logprobs=True,
        )

    def timed(self, load: Load) -> tuple[float, float]:
        with self._model.continuous_batching_context_manager(
            generation_config=self._generation, continuous_batching_config=self._config, block=True, timeout=5
        ) as manager:
            return stopwatch(lambda: self._run(manager, load))

    def _run(self, manager: Any, load: Load) -> None:
        wanted = {
            manager.add_request(p, max_new_tokens=n, eos_token_id=-1): n
            for p, n in zip(load.prompts, load.lengths, strict=True)
        }
        deadline = time.monotonic() + WAIT_S
        while wanted:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                check(len(result.logprobs), wanted.pop(result.request_id))
            assert time.monotonic() < deadline, f"{self.name} left {len(wanted)} requests"

    def close(self) -> None:
        return


def check(count: int, wanted: int) -> None:
    if count != wanted:
        raise SystemExit(f"{count} tokens with log-probs instead of {wanted}: the comparison would be wrong")


def stopwatch(function: Callable[[], None]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of the process)."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    function()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def timed(contestant: Any, load: Load) -> tuple[float, float]:
    own = getattr(contestant, "timed", None)
    return own(load) if own else stopwatch(lambda: contestant.run(load))


@dataclass(frozen=True)
class Row:
    """One contestant on one load."""

    preset: str
    load: str
    name: str
    wall_rates: list[float]
    cpu_rates: list[float]


def measure(preset: str, num_rows: int, num_rounds: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, preset, seed=0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        contestants = [
            Embedded(Path(folder), num_rows), Embedded(Path(folder), num_rows, is_invariant=True),
            Generate(model, num_rows), Continuous(model, num_rows),
        ]  # fmt: skip
        for load in make_loads(num_rows, seed=1):
            seconds: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contestants}
            for number in range(num_rounds + 1):
                for contestant in contestants:
                    taken = timed(contestant, load)
                    if number:  # round 0 warms up
                        seconds[contestant.name].append(taken)
                    print(f"{preset} {load.name} round {number} {contestant.name}: {taken[0]:.2f} s", file=sys.stderr)
            for name, found in seconds.items():
                wall_rates, cpu_rates = ([load.num_tokens / s for s in column] for column in zip(*found, strict=True))
                rows.append(Row(preset, load.name, name, wall_rates, cpu_rates))
        for contestant in contestants:
            contestant.close()
    return rows


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(rows: list[Row], num_rows: int, num_rounds: int) -> str:
    load_average = os.getloadavg()[0]
    head = (
        f"{cpu_name()}, {os.cpu_count()} CPUs, load average {load_average:.1f}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; 1 thread, float32, {num_rows} rows, "
        f"{PROMPT_TOKENS} prompt tokens, median of {num_rounds} interleaved rounds (lowest to highest)."
    )
    lines = [
        "### Embedded engine against transformers",
        "",
        head,
        "",
        "| model | load | engine | tokens/s | tokens/CPU-s | embedded is faster by (wall, CPU) | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = next(r for r in rows if (r.preset, r.load) == (row.preset, row.load))
        wall, cpu = statistics.median(row.wall_rates), statistics.median(row.cpu_rates)
        ratio = goal = ""
        if row is not own:
            wall_ratio = statistics.median(own.wall_rates) / wall
            cpu_ratio = statistics.median(own.cpu_rates) / cpu
            ratio = f"{wall_ratio:.2f}x, {cpu_ratio:.2f}x"
            if wanted := GOALS.get(row.name):
                goal = f"{wanted}x {'met' if wall_ratio >= wanted else 'missed'}"
        spread = f"{min(row.wall_rates):.0f}-{max(row.wall_rates):.0f}"
        lines.append(
            f"| {row.preset} | {row.load} | {row.name} | {wall:.0f} ({spread}) | {cpu:.0f} | {ratio} | {goal} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="1m,5m")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [r for preset in options.presets.split(",") for r in measure(preset, options.rows, options.rounds)]
    text = table(rows, options.rows, options.rounds)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
