"""A gang of ranks trains, leaves its GPUs every few steps and comes back: are its steps those of one that never left?

    python memory_gang_training.py [--ranks 2] [--backend megatron] [--shape 0.6b] [--steps 100] [--every 5]
    python memory_gang_training.py --device cpu

Data parallelism over NCCL, one rank a GPU, the backend that `myxa up` would build from `memory_colocated.toml`. At each
switch the communicators are released, parameters, gradients and optimizer leave, then all come back, and training goes
on with the next step. The same steps without a switch are made before. Compared, bit by bit: every step's loss, norm of
the gradients and whatever else it tells but times, and the last weights. If something differs, the steps are made once
more without a switch: where those differ too, training itself does not repeat, and nothing is said about the switch.

So kernels are deterministic in all of them, which is more than a flag: torch's flash attention adds up its gradients in
any order while the flag only warns, Megatron's embedding does without a flag of its own, Inductor and NCCL choose
kernels by what they time or see. An operation that has no deterministic kernel ends a rank that is strict; the runs are
then begun again with one that is not, and the report says which operation it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import Report, median, number, parser, part_seconds, work_folder
from make_model import make_apart
from memory_colocated import RUN_FILE, sets_of
from memory_figures import MIB, quantile, tell_when_ended
from servers import free_port
from train_speed import how_it_ended, make_shard, run_ranks
from trial_runs import stage

from myxa.actors.backends.torch_backend.world import Gang
from myxa.actors.tenancy.time_share import TRAINER_TAGS
from myxa.core.clock import SystemClock
from myxa.core.config import load_config
from myxa.launch.composition.trainer_parts import gang_comms, make_backend
from myxa.launch.supervisor.placement import place

NORM = "train/grad_norm"
TIMES = ("_s", "_per_s")
COMMS_S = 30.0
HANGS_S = 40.0
"""A rank whose step or switch takes so long, once the first step is made, ends with its stacks in its log."""
SWITCH_S = 4.0
SAVED_EVERY = 10
"""Steps after which a rank writes down what it has: a run that fails is compared as far as it came."""
LEAST_S = 20.0
"""A run with less time than this is not begun."""


# -- one rank ----------------------------------------------------------------------------------------------------------


class Member:
    """This process: a backend whose memory can leave, and what releases its communicators."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self._torch, self._options = torch, options
        self._is_cuda = options.device == "cuda"
        if self._is_cuda:
            torch.use_deterministic_algorithms(True, warn_only=options.lenient)
        self.rank = int(os.environ["RANK"])
        sets = [*sets_of(options, "ours", 0.85), f'model.path="{options.folder / "model"}"']
        config = load_config([options.folder / RUN_FILE], sets)
        spec = next(actor for actor in place(config, 1) if actor.name == f"trainer/{self.rank}")
        gang, make_comms = gang_comms(config, Gang.from_environment(os.environ), on_gpus=self._is_cuda)
        self.backend = make_backend(spec, config, gang, SystemClock())
        self.facts = self.backend.setup()
        store = self.backend.memory()
        assert make_comms is not None, "a gang has communicators to give back"
        assert store is not None, "a run that takes turns has memory that leaves"
        self.comms, self.store = make_comms(), store
        self._epoch = 0

    def free(self) -> int:
        """Bytes of the device; 0 without one."""
        if not self._is_cuda:
            return 0
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()
        return int(self._torch.cuda.mem_get_info()[0])

    def switch(self) -> dict[str, float]:
        """Out and in again; seconds, and bytes."""
        before = self.free()
        marks = [time.perf_counter()]
        self.comms.release(self._next(), COMMS_S)
        marks.append(time.perf_counter())
        moved = self.store.release(TRAINER_TAGS)
        marks.append(time.perf_counter())
        freed = self.free() - before
        back = time.perf_counter()
        self.store.restore(TRAINER_TAGS)
        marks.append(marks[-1] + time.perf_counter() - back)
        back = time.perf_counter()
        self.comms.restore(self._next(), COMMS_S)
        marks.append(marks[-1] + time.perf_counter() - back)
        names = ("communicators out", "tags out", "tags in", "communicators in")
        took = {name: marks[index + 1] - marks[index] for index, name in enumerate(names)}
        return {**took, "all": marks[-1] - marks[0], "freed": float(freed), "copied": float(moved)}

    def _next(self) -> int:
        self._epoch += 1
        return self._epoch


def rank_main(options: argparse.Namespace) -> None:
    """Train; leave what the steps told, the switches and a digest of the last weights in a file."""
    me = Member(options)
    vocab_size = json.loads((options.folder / "model" / "config.json").read_text())["vocab_size"]
    steps: list[dict[str, float]] = []
    switches: list[dict[str, float]] = []
    facts = {name: str(value) for name, value in me.facts.items()}

    def save(weights: str) -> None:
        target = options.folder / f"{options.name}.{me.rank}.json"
        found = {"steps": steps, "switches": switches, "weights": weights, "facts": facts}
        target.with_suffix(".partial").write_text(json.dumps(found))
        target.with_suffix(".partial").replace(target)

    for step in range(options.steps):
        if step:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
        if options.switches and step and step % options.every == 0:
            print(f"{time.strftime('%H:%M:%S')} step {step}: a switch", flush=True)
            switches.append(me.switch())
        stats = me.backend.train(make_shard(options, me.rank, vocab_size, step), {})
        steps.append({name: value for name, value in stats.metrics.items() if not name.endswith(TIMES)})
        if step % SAVED_EVERY == 0:
            print(f"{time.strftime('%H:%M:%S')} step {step} is made", flush=True)
            save("")
    faulthandler.cancel_dump_traceback_later()
    digest = hashlib.sha256()
    for array in me.backend.export_weights():
        digest.update(array.data)
    save(digest.hexdigest())
    me.backend.exchange("done")  # rank 0 hosts the store
    sys.stdout.flush()
    os._exit(0)  # native threads of collectives have nothing more to do


# -- all ranks ---------------------------------------------------------------------------------------------------------


class RanksFailedError(Exception):
    """A rank ended badly, or none in time; the text holds the ends of the logs."""

    def __init__(self, text: str, strict: str) -> None:
        """`strict`: which operation has no deterministic kernel, if that was it."""
        super().__init__(text)
        self.strict = strict


STRICT = re.compile(r"\S+ does not have a deterministic implementation")
"""What torch says of an operation."""
LOG_END = 2500
REPEATING = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1", "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}  # fmt: skip


def run(options: argparse.Namespace, name: str, *, switches: bool) -> list[dict[str, Any]]:
    """What each rank found."""
    base = {
        **os.environ, "WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "4" if options.device == "cuda" else "1", **REPEATING,
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:], "--name", name]
    command += ["--folder", str(options.folder), *(("--switches",) if switches else ())]
    command += ["--lenient"] if options.lenient else []
    logs = [options.folder / f"{name}.{rank}.log" for rank in range(options.ranks)]
    for old in options.folder.glob(f"{name}.*.json"):
        old.unlink()
    left_s = options.ends_at - time.monotonic()
    if left_s < LEAST_S:
        raise RanksFailedError(f"{name}: no time was left for it", "")
    statuses = run_ranks(command, base, logs, min(options.limit, left_s - 5))
    bad = [rank for rank, status in enumerate(statuses) if status != 0]
    if bad:
        said = {rank: logs[rank].read_text(encoding="utf-8", errors="replace") for rank in bad}
        strict = next((found[0] for text in said.values() if (found := STRICT.search(text))), "")
        parts = [
            f"{name}: rank {rank} {how_it_ended(statuses[rank])}; its log ends with\n{said[rank][-LOG_END:]}"
            for rank in bad
        ]
        raise RanksFailedError("\n".join(parts), strict)
    return kept(options, name)


def kept(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """What the ranks of a run found so far."""
    return [json.loads(file.read_text()) for file in sorted(options.folder.glob(f"{name}.*.json"))]


def num_unequal(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    """Steps of any rank that told something else, to the bit, and ranks with other last weights."""
    pairs = list(zip(one, other, strict=True))
    steps = sum(a != b for x, y in pairs for a, b in zip(x["steps"], y["steps"], strict=True))
    return steps + sum(x["weights"] != y["weights"] for x, y in pairs)


def first_unequal(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Where it begins: "rank 1, step 0: train/grad_norm 1.5 and 1.25"."""
    for step in range(len(one[0]["steps"])):
        for rank, (x, y) in enumerate(zip(one, other, strict=True)):
            a, b = x["steps"][step], y["steps"][step]
            names = [f"{name} {a.get(name)!r} and {b.get(name)!r}" for name in sorted(a) if a.get(name) != b.get(name)]
            if names:
                return f"rank {rank}, step {step}: {'; '.join(names[:3])}"
    return "the last weights alone"


def tell_switches(report: Report, found: list[dict[str, Any]]) -> None:
    """The slowest rank of each switch."""
    switches = [rank["switches"] for rank in found]
    num_done = min(map(len, switches), default=0)  # of a run that was cut off some have one more
    if num_done < 2:
        report.say(f"- {num_done} switches were done")
        return
    rows: list[tuple[str, ...]] = []
    for part in ("communicators out", "tags out", "tags in", "communicators in", "all"):
        slowest = [max(rank[index][part] for rank in switches) for index in range(num_done)]
        cells = (slowest[0], median(slowest[1:]), quantile(slowest[1:], 0.95))
        rows.append((part, *(number(cell) for cell in cells)))
        if part == "all":
            report.goal("a switch out and in, s, median", median(slowest[1:]), at_most=SWITCH_S)
    title = f"{num_done} switches of {len(found)} ranks, the slowest"
    report.table(title, ("", "first, s", "median of the rest, s", "95 %, s"), rows)
    for rank, each in enumerate(switches):
        freed, copied = (median([switch[what] for switch in each]) or 0.0 for what in ("freed", "copied"))
        report.say(f"- rank {rank}: {freed / MIB:,.0f} MiB left the device, {copied / MIB:,.0f} MiB of them copied")


def measure(options: argparse.Namespace, report: Report) -> None:
    try:
        stayed = run(options, "stayed", switches=False)
    except RanksFailedError as error:
        if options.lenient or not error.strict:
            raise
        report.say(f"- {error.strict}: with such operations as they are")
        report.keep("not deterministic", error.strict)
        options.lenient = True
        stayed = run(options, "stayed", switches=False)
    report.say(f"- {stayed[0]['facts']}")
    report.keep("stayed", stayed)
    try:
        left = run(options, "left", switches=True)
    except RanksFailedError:
        tell_cut_short(report, stayed, kept(options, "left"))
        raise
    report.keep("left", left)
    tell_switches(report, left)
    told = stayed[0]["steps"]
    rows = [(name, *(number(step[name]) for step in (told[0], told[-1]))) for name in sorted(told[0])]
    report.table("What a step tells", ("", "first step", "last step"), rows)
    norms = {step[NORM] for step in told}
    report.goal("different norms of gradients in all steps", float(len(norms)), at_least=0.9 * len(told))
    judge(report, stayed, left, lambda: run(options, "again", switches=False))


def tell_cut_short(report: Report, stayed: list[dict[str, Any]], left: list[dict[str, Any]]) -> None:
    """Of switches that did not come to their end: how fast they were, and whether the steps by then were the same."""
    report.keep("left, cut short", left)
    if len(left) < len(stayed):
        report.say(f"- {len(left)} of {len(stayed)} ranks had begun to train")
        return
    num_steps = min(len(rank["steps"]) for rank in left)
    first = [[{**rank, "steps": rank["steps"][:num_steps], "weights": ""} for rank in run] for run in (stayed, left)]
    report.say(f"- of the {num_steps} steps that were made with switches {num_unequal(*first)} differ")
    tell_switches(report, left)


def judge(
    report: Report, stayed: list[dict[str, Any]], left: list[dict[str, Any]], again: Callable[[], list[dict[str, Any]]]
) -> None:
    """Whether a switch changed anything. `again`: makes the steps without a switch once more; called if need be."""
    unequal: float | None = num_unequal(stayed, left)
    if unequal:
        report.say(f"- {unequal:.0f} steps and weights differ, at first {first_unequal(stayed, left)}")
        try:
            third = again()
        except RanksFailedError as error:
            report.say(f"- whether training itself repeats is not known: {error}")
            report.goal("steps and weights that are not bit-equal to those without a switch", None, at_most=0.0)
            return
        differing = num_unequal(stayed, third)
        report.keep("again", differing)
        if differing:
            where = first_unequal(stayed, third)
            report.say(f"- training itself does not repeat: {differing} differ without a switch too, at first {where}")
            unequal = None
        else:
            report.say("- training itself repeats: the same steps once more, without a switch, are all equal")
    report.goal("steps and weights that are not bit-equal to those without a switch", unequal, at_most=0.0)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--backend", choices=("torch", "megatron"), default="megatron")
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--steps", type=int, default=100)
    args.add_argument("--every", type=int, default=5)
    args.add_argument("--packs", type=int, default=1)
    args.add_argument("--per-pack", type=int, default=4)
    args.add_argument("--length", type=int, default=512)
    args.add_argument("--limit", type=float, default=90.0, help="seconds for one run")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    args.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    args.add_argument("--name", default="", help=argparse.SUPPRESS)
    args.add_argument("--switches", action="store_true", help=argparse.SUPPRESS)
    args.add_argument("--lenient", action="store_true", help=argparse.SUPPRESS)
    args.set_defaults(gpus=0, servers="each", capacity_mib=64)
    options = args.parse_args()
    options.gpus = options.world = options.ranks
    options.ends_at = time.monotonic() + part_seconds(3600.0)
    is_cpu = options.device == "cpu"
    if is_cpu:
        options.shape, options.steps, options.length, options.backend = "dry", 20, 64, "torch"
    options.tokens = options.per_pack * options.length
    options.overrides = [
        f'roles.trainer.kind="{options.backend}"', 'memory.communicators="reload"', 'algo.correction="none"',
        f"rollout.max_new_tokens={options.length}", "optimizer.lr=1e-4",
        *(("megatron.model.deterministic_mode=true",) if options.backend == "megatron" else ()), *options.overrides,
    ]  # fmt: skip
    if options.name:
        rank_main(options)
        return
    report = Report(f"memory_gang_training{options.ranks}", is_dry=is_cpu)
    tell_when_ended(report)  # the runs have limits of their own, within the part's
    options.folder = work_folder() / "memory_gang_training"
    stage(options.folder, RUN_FILE, "spread_reward.py", launches=not is_cpu)
    make_apart(options.folder / "model", options.shape, options.device)
    (options.folder / "data").mkdir(parents=True, exist_ok=True)
    (options.folder / "data" / "prompts.jsonl").write_text('{"prompt": "a", "label": "a"}\n')
    try:
        measure(options, report)
    except RanksFailedError as error:
        report.tell_goals()
        report.failed(str(error))
    report.end()


if __name__ == "__main__":
    main()
