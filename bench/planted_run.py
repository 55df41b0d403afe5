"""A run directory as a real run leaves it, made in a second: for looking at reports and for testing them.

The actors are simulated on a manual clock, but meters, telemetry buffers and sinks are the real ones, so the files are
byte for byte what a run of these times would have written.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.knobs import AuditRecord, KnobMove, Operator
from myxa.core.sink import SinkContext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.harness.manual_clock import ManualClock

CONFIG = """# resolved by myxa
[run]
name = "sort"
num_steps = {num_steps}
seed = 1

[model]
path = "model/"

[data]
train = "data/train.jsonl"

[rollout]
num_samples = 8
max_new_tokens = 32
temperature = 1.0

[reward]
fn = "exact"

[algo]
kind = "dapo"
batch_size = 32
correction = "decoupled"

[async]
max_staleness = 2
policy = "pace"

[optimizer]
lr = 1e-4

[roles.rollout]
count = 2
env = {{ OMP_NUM_THREADS = "1", WANDB_API_KEY = "do-not-show-me" }}
"""


class PlantedRun:
    """Trainer, two rollout actors, buffer and coordinator going through their motions."""

    def __init__(self, run_dir: Path, num_steps: int, seed: int) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.num_steps = num_steps
        self.version = 0
        self.sinks = (JsonlSink(), ChromeTraceSink())
        context = SinkContext(run_dir=run_dir, run_name="sort", clock=self.clock, emit=lambda kind, text: None)
        for sink in self.sinks:
            sink.open(context)
        self.buffers: dict[str, TelemetryBuffer] = {}
        for name in ("trainer/0", "rollout/0", "rollout/1", "buffer", "coordinator"):
            meter = ActivityMeter(name, self.clock)
            self.buffers[name] = TelemetryBuffer(name, self.clock, meter=meter, time_every_s=5.0)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._num = 0

    def meter(self, name: str) -> ActivityMeter:
        meter = self.buffers[name].meter
        assert meter is not None
        return meter

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self._num += 1
        heapq.heappush(self._queue, (self.clock.monotonic() + seconds, self._num, action))

    def run(self, end: str) -> None:
        self.buffers["coordinator"].event("phase", "starting -> running")
        for index in range(2):
            self.buffers["coordinator"].event("engine-joined", f"rollout/{index} (epoch {index + 3})")
            self.after(0.3 * index, lambda index=index: self.roll(index))
        self.after(0.1, self.claim)
        self.after(1.0, self.report)
        while self._queue and self.version < self.num_steps:
            moment, _, action = heapq.heappop(self._queue)
            self.clock.advance(max(0.0, moment - self.clock.monotonic()))
            action()
        if end:
            self.buffers["coordinator"].event("phase", "running -> draining")
            self.buffers["coordinator"].event("phase", f"draining -> {end}")
            self.buffers["coordinator"].event("run-ended", f"all {self.num_steps} steps were trained")
        for name in self.buffers:
            self.meter(name).close_span()
        self.send()
        for sink in self.sinks:
            sink.close()

    def claim(self) -> None:
        self.meter("trainer/0").switch("wait-data", "claim")
        self.after(self.rng.uniform(0.5, 1.6) * (2.5 if self.version % 17 == 16 else 1.0), self.train)

    def train(self) -> None:
        self.meter("trainer/0").switch("compute", "train", version=self.version)
        self.after(self.rng.uniform(0.5, 0.8), self.publish)

    def publish(self) -> None:
        self.meter("trainer/0").switch("compute", "publish", makes_version=self.version + 1)
        self.after(0.12, self.made)

    def made(self) -> None:
        self.version += 1
        step, rng = self.version, self.rng
        learnt = 1 / (1 + math.exp(-(step - self.num_steps * 0.45) / (self.num_steps * 0.09)))
        lags = [min(2, int(rng.expovariate(1.1))) for _ in range(32)] if step > 2 else [0] * 32
        values = {
            "train/loss": 0.02 * rng.gauss(0, 1) - 0.01 * learnt,
            "train/grad_norm": 0.4 + rng.expovariate(4) + 1.5 * learnt * (1 - learnt),
            "train/lr": 1e-4 * min(1.0, step / 5),
            "train/entropy": 2.2 - 1.7 * learnt + rng.gauss(0, 0.04),
            "train/approx_kl": abs(rng.gauss(0.002, 0.001)),
            "train/clip_fraction": abs(rng.gauss(0.03, 0.01)),
            "train/logprob_diff_abs_mean": abs(rng.gauss(0.012, 0.004)),
            "train/num_tokens": 32 * 8 * rng.uniform(18, 24),
            "train/tokens_per_s": rng.uniform(2100, 2600),
            "train/step_s": rng.uniform(0.5, 0.8),
            "weights/publish_s": 0.12 + rng.expovariate(40),
            "reward/mean": max(0.0, min(1.0, 0.03 + 0.9 * learnt + rng.gauss(0, 0.035))),
            "reward/std": math.sqrt(max(0.01, learnt * (1 - learnt))),
            "lag/max": float(max(lags)),
            "lag/mean": sum(lags) / len(lags),
            "lag/min": float(min(lags)),
            "batch/num_groups": 32.0,
            "batch/response_tokens_mean": rng.uniform(18, 24),
            "batch/truncated_fraction": max(0.0, 0.3 - 0.3 * learnt + rng.gauss(0, 0.01)),
            **{f"lag_hist/{lag}": float(lags.count(lag)) for lag in set(lags)},
        }
        self.buffers["trainer/0"].metric(step, values)
        self.buffers["buffer"].metric(step, self.finished(learnt))
        if step % 10 == 0:
            self.buffers["coordinator"].metric(step, {"eval/reward": 0.02 + 0.92 * learnt})
            self.buffers["coordinator"].event("eval", f"held-out reward {0.02 + 0.92 * learnt:.3f} over 256 samples")
        for index in range(2):
            self.after(0.05 + 0.2 * index, lambda index=index: self.adopt(index))
        self.claim()

    def finished(self, learnt: float) -> dict[str, float]:
        """Of all groups that were finished since the step before; the filter left some of them out."""
        right, wrong = 0.5 * learnt**2, 0.5 * (1 - learnt) ** 2
        num_flat = float(int(40 * (right + wrong)))
        return {
            "reward/raw_mean": max(0.0, min(1.0, 0.02 + 0.93 * learnt + self.rng.gauss(0, 0.02))),
            "reward/raw_std": math.sqrt(max(0.01, learnt * (1 - learnt))),
            "reward/pass_rate": learnt,
            "reward/all_right": right,
            "reward/all_wrong": wrong,
            "reward/finished_groups": 40.0,
            "reward/left_out_groups": num_flat,
            "reward/zero_std_groups": num_flat,
        }

    def adopt(self, index: int) -> None:
        name, version = f"rollout/{index}", self.version
        meter, seconds = self.meter(name), 0.04 + self.rng.expovariate(60)
        block = meter.during("wait-weights", "adopt", adopts_version=version)
        block.__enter__()
        self.after(seconds, lambda: bool(block.__exit__(None, None, None)))
        self.buffers[name].event("weights-adopted", f"serves version {version}", version=version)
        self.buffers["coordinator"].metric(version, {"weights/adopt_s": seconds})

    def roll(self, index: int) -> None:
        kind = self.rng.choices(("compute", "wait-capacity", "wait-data"), (14, 1.5, 1))[0]
        name = {"compute": "generate", "wait-capacity": "draw", "wait-data": "reward"}[kind]
        self.meter(f"rollout/{index}").switch(kind, name)
        self.after(self.rng.uniform(0.1, 0.6) * (2.0 if kind == "compute" else 0.5), lambda: self.roll(index))

    def report(self) -> None:
        """Once a second: gauges, and everything goes to the sinks."""
        rng = self.rng
        for index in range(2):
            values = {"rollout/tokens_per_s": rng.uniform(1200, 1600), "rollout/running": float(rng.randint(20, 48))}
            values |= {"rollout/waiting": float(rng.randint(0, 4)), "rollout/num_groups": float(self.version * 17)}
            self.buffers[f"rollout/{index}"].metric(self.version, values)
        counts = {"dispatched": rng.randint(20, 60), "ready": rng.randint(0, 40), "claimed": 32, "trained": 64}
        counts |= {"dropped/zero-variance": self.version * 3, "dropped/reward-error": self.version // 20}
        counts |= {"slots_used": rng.randint(60, 96), "durable": self.version * 32}
        self.buffers["buffer"].metric(self.version, {f"buffer/{name}": float(value) for name, value in counts.items()})
        if rng.random() < 0.02:
            self.buffers["rollout/1"].event("group-dropped", "group 77: reward function raised ValueError: no <answer>")
        self.send()
        self.after(1.0, self.report)

    def send(self) -> None:
        for buffer in self.buffers.values():
            bundle = buffer.drain()
            for sink in self.sinks:
                sink.write(bundle)
        for sink in self.sinks:
            sink.flush()


CHANGES = (
    (0.25, "set", "max_staleness", "buffer", 2, 4, "trainer waits for data", "ada", "done", ""),
    (0.26, "set", "temperature", "buffer", 1.0, 0.9, "", "ada", "done", ""),
    (
        0.45,
        "set",
        "lr",
        "trainer/0",
        1e-4,
        1.0,
        "faster!",
        "bob",
        "refused",
        "more than 10 times the run file's 0.0001",
    ),
    (0.5, "set", "lr", "trainer/0", 1e-4, 5e-5, "loss is noisy", "bob", "done", ""),
    (0.8, "undo", "max_staleness", "buffer", 4, 2, "", "ada", "done", ""),
)
"""(share of the steps, verb, knob, owner, old, new, reason, user, result, detail)"""


def plant_changes(run_dir: Path) -> None:
    """An audit log that fits the metrics of a planted run. Its chain of digests is left out."""
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    walls = {point["step"]: point["wall_s"] for point in points if "train/loss" in point["values"]}
    lines: list[bytes] = []
    for number, (share, verb, name, owner, old, new, reason, user, result, detail) in enumerate(CHANGES, 1):
        step = max(1, int(share * max(walls)))
        move = KnobMove(name=name, owner=owner, old=old, new=new, boundary="step")
        record = AuditRecord(
            number=number,
            wall_s=walls[step],
            verb=verb,
            who=Operator(user=user, uid=1000, via="socket"),
            arguments={"values": {name: new}},
            result=result,
            detail=detail,
            reason=reason,
            epoch=number if result == "done" else 0,
            at=step if result == "done" else 0,
            version=step,
            moves=(move,) if result == "done" else (),
        )
        lines.append(msgspec.json.encode(record) + b"\n")
    (run_dir / "audit.jsonl").write_bytes(b"".join(lines))


def plant_run(run_dir: Path, *, num_steps: int = 120, seed: int = 1, end: str = "finished") -> Path:
    """Fill `run_dir`; `end`: the last phase, "" for a run that was killed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(CONFIG.format(num_steps=num_steps))
    PlantedRun(run_dir, num_steps, seed).run(end)
    return run_dir
