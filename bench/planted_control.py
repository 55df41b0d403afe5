"""A control socket as a real run has it, over a planted run: the real server and protocol, planted answers.

For looking at `myxa top` and `myxa dashboard`, and for testing them: `python bench/planted_control.py FOLDER` serves
until Ctrl-C. Its knobs can be turned and it refuses what a run refuses; one sample holds hostile HTML.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from planted_run import plant_changes, plant_run

from myxa.core.errors import ConfigError, DeadlineExceeded
from myxa.core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    KnobMove,
    KnobSheet,
    KnobState,
    KnobTable,
    KnobValue,
    Operator,
    Tunable,
)
from myxa.core.messages import BufferStats, EngineStatus, RolloutNow, RunStatus
from myxa.launch import verbs
from myxa.launch.control.client import ControlNote
from myxa.launch.control.server import ControlServer, Handler, ServerLimits, VerbContext
from myxa.launch.views.numbers import name_order
from myxa.launch.views.run_view import ActorFacts, RunView
from myxa.launch.web.dashboard import Dashboard

HOSTILE = "<script>window.hacked = true</script><img src=x onerror='window.hacked=true'> \u202egnirts"

KNOBS = (
    Tunable(name="lr", kind="float", boundary="step", owner="trainer", help="Step size of the optimizer.",
            key="optimizer.lr", low=0, is_low_open=True, guard_factor=10),
    Tunable(name="clip_low", kind="float", boundary="step", owner="trainer", help="Lower clip of the ratio.", low=0),
    Tunable(name="max_staleness", kind="int", boundary="request", owner="buffer", unit="versions",
            key="async.max_staleness", help="Largest lag of any trained token.", low=0, high=64),
    Tunable(name="policy", kind="choice", boundary="now", owner="buffer", choices=("pace", "wait", "drop"),
            help="What is done with groups that get too old."),
    Tunable(name="temperature", kind="float", boundary="request", owner="buffer", low=0, is_low_open=True,
            help="Temperature of sampling; the trainer scores at the same."),
    Tunable(name="concurrency", kind="int", boundary="request", owner="rollout", unit="groups", low=1, high=4096,
            help="Groups that an engine works on at once."),
    Tunable(name="eval_every", kind="int", boundary="now", owner="coordinator", unit="steps", low=0,
            help="Steps between evaluations; 0: none."),
)  # fmt: skip
FIRST: dict[str, KnobValue] = {
    "lr": 1e-4, "clip_low": 0.2, "max_staleness": 4, "policy": "pace", "temperature": 1.0, "concurrency": 16,
    "eval_every": 10,
}  # fmt: skip
ACTORS = ("coordinator", "buffer", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2", "monitor")
OWNERS = {"trainer": ("trainer/0",), "rollout": ACTORS[4:7]}


class PlantedSeat:
    """The state behind the planted verbs."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.values: dict[str, KnobValue] = dict(FIRST)
        self.records: list[AuditRecord] = [
            msgspec.json.decode(line, type=AuditRecord) for line in (run_dir / "audit.jsonl").read_bytes().splitlines()
        ]
        self.version = 120
        self.phase: Any = "running"
        self.paused = ""
        self.silent: set[str] = set()
        """Verbs that answer with a missed deadline."""
        self.started = time.time() - 233
        self.limits = ServerLimits()
        self.noted: list[AuditRecord] = []
        """By the control server."""
        self.rng = random.Random(3)

    def handlers(self) -> dict[verbs.Verb[Any], Handler]:
        """Of all verbs that it answers."""
        plain = {
            verbs.STATUS: self.status, verbs.GET: self.get, verbs.LOGS: self.logs,
            verbs.STACK: self.stack,
        }  # fmt: skip
        return {verb: self._read(verb.name, answer) for verb, answer in plain.items()} | {verbs.SET: self.set}

    def _read(self, name: str, answer: Any) -> Handler:
        async def run(context: VerbContext, given: Any, who: Operator) -> Any:
            if name in self.silent:
                raise DeadlineExceeded(f"{name} was not answered in time", remedy="ask again")
            return answer(given)

        return run

    def status(self, given: verbs.StatusArguments) -> RunView:
        rng, names = self.rng, ("trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2")
        snapshot: dict[str, dict[str, float]] = {
            "metrics": {
                "reward/raw_mean": 0.91, "reward/raw_std": 0.21, "reward/mean": 0.7,
                "train/loss": -0.0123, "train/grad_norm": 0.61,
                "train/entropy": 0.48, "train/approx_kl": 0.0021, "train/logprob_diff_abs_mean": 0.0119,
                "lag/max": 3.0, "lag/mean": 0.9, "lag/min": 0.0, "train/lr": float(self.values["lr"]),
                "lag_hist/0": 14.0, "lag_hist/1": 11.0, "lag_hist/2": 5.0, "lag_hist/3": 2.0,
                "reward/zero_std_groups": 3.0, "reward/finished_groups": 40.0, "reward/pass_rate": 0.91,
                "reward/all_right": 0.05, "reward/all_wrong": 0.025,
            },
            "age_s": dict.fromkeys(ACTORS, 0.4),
            "monitor": {"dropped": 0.0, "refused": 0.0},
        }  # fmt: skip
        for name in names:
            wait = rng.uniform(0.5, 0.6) if name.startswith("trainer") else rng.uniform(0.02, 0.06)
            snapshot[f"time/{name}"] = {
                "compute": 1 - wait - 0.03,
                "wait-data": wait,
                "wait-weights": 0.02,
                "other": 0.01,
                **({"rollouts/tool": 6.0, "rollouts/generate": 3.0} if name.startswith("rollout/") else {}),
            }
        snapshot["trainer/0"] = {"train/tokens_per_s": 2400.0, "train/loss": -0.0123}
        for name in names[2:]:
            snapshot[name] = {"rollout/tokens_per_s": rng.uniform(800, 1000), "rollout/running": 32.0}
        status = RunStatus(
            name="sort", phase=self.phase, version=self.version, num_steps=400, paused=self.paused, eval_reward=0.94,
            engines=tuple(
                EngineStatus(rollout=name, version=self.version - n % 2, running=rng.randint(20, 40), waiting=n,
                             draining=n == 2) for n, name in enumerate(names[2:])
            ),
        )  # fmt: skip
        stats = BufferStats(
            states={"DISPATCHED": 41, "READY": 12, "CLAIMED": 32, "TRAINED": 64, "DURABLE": 3712, "DROPPED": 360,
                    "REQUEUED": 0},
            drawn=4221, trained=3776, dropped={"zero_variance": 354, "reward-error": 6}, slots_total=96, slots_used=85,
            max_staleness=int(self.values["max_staleness"]), policy=str(self.values["policy"]),
        )  # fmt: skip
        view = RunView(
            run_dir=str(self.run_dir), started_wall_s=self.started, now_wall_s=time.time(), status=status, buffer=stats,
            snapshot=snapshot,
        )  # fmt: skip
        return self._whole(view) if given.whole else view

    def _whole(self, view: RunView) -> RunView:
        actors = [
            ActorFacts(name, name.partition("/")[0], int(name == "rollout/2"), pid=4000 + n, state="up",
                       host="worker-b" if name == "rollout/2" else "worker-a")
            for n, name in enumerate(ACTORS)
        ]  # fmt: skip
        waits = RolloutNow(
            actor="rollout/0", group_id=41, index=3, row=17, source="/data/gsm.jsonl", is_held_out=False, turn=2,
            doing=f"tool {HOSTILE[:40]}", since_s=75.0, began_s=90.0,
        )  # fmt: skip
        return msgspec.structs.replace(
            view,
            under_way=(waits,),
            actors=tuple(sorted(actors, key=lambda actor: (actor.node, name_order(actor.name)))),
            knobs=self.get(),
            history=tuple(self.records[-50:]),
            why="trainer/0 waits for data 54 % of the time: generation is the bottleneck (3 rollouts compute 93 %)",
            remedy="more rollout actors (roles.rollout.count), a smaller rollout.max_new_tokens, or a faster engine",
        )

    def get(self, given: verbs.Arguments | None = None) -> KnobTable:
        sheets = {owner: list[KnobState]() for owner in ACTORS}
        for knob in KNOBS:
            for owner in OWNERS.get(knob.owner, (knob.owner,)):
                sheets[owner].append(KnobState(tunable=knob, value=self.values[knob.name], first=FIRST[knob.name]))
        told = tuple(KnobSheet(owner=owner, knobs=tuple(states)) for owner, states in sheets.items() if states)
        return KnobTable(sheets=told, epoch=len(self.records), reverts={"temperature": "at step 160"})

    def logs(self, given: verbs.LogsArguments) -> dict[str, Any]:
        lines = [f"12:00:{n % 60:02d} info {given.target}: line {n} \x1b[31mred\x1b[0m" for n in range(given.num_lines)]
        return {"actor": given.target, "lines": lines}

    def stack(self, given: verbs.TargetArguments) -> dict[str, Any]:
        text = 'Thread 1 (MainThread):\n  File "trainer.py", line 12 in step\n    loss.backward()'
        return {"actor": given.target, "text": text}

    async def set(self, context: VerbContext, given: ChangeRequest, who: Operator) -> ChangeReply:
        known = {knob.name: knob for knob in KNOBS}
        moves: list[KnobMove] = []
        for name, raw in given.values.items():
            if name not in known:
                raise ConfigError(f"there is no knob {name!r}", remedy="`myxa get` lists them")
            value = known[name].check(raw, first=FIRST[name], force=given.force)
            owners = OWNERS.get(known[name].owner, (known[name].owner,))
            moves += [
                KnobMove(name=name, owner=owner, old=self.values[name], new=value, boundary=known[name].boundary)
                for owner in owners
            ]
            self.values[name] = value
        epoch = len(self.records) + 1
        self.records.append(
            AuditRecord(number=epoch, wall_s=time.time(), verb="set", who=Operator(user=who.user, via=who.via),
                        reason=given.reason, arguments={"values": dict(given.values)}, result="done", epoch=epoch,
                        at=self.version, version=self.version, moves=tuple(moves))
        )  # fmt: skip
        return ChangeReply(epoch=epoch, at=self.version, moves=tuple(moves))


def planted_group(number: int) -> dict[str, Any]:
    """A line of samples.jsonl; number 1000 is hostile."""
    rng, told = random.Random(number), f"\n{HOSTILE}" if number == 1000 else ""
    turn = {"role": "assistant", "is_model": True, "num_tokens": 24, "num_learnt": 24, "oldest_version": 118,
            "newest_version": 119}  # fmt: skip
    call = '<think>It is long.</think><tool_call>{"name": "sort", "arguments": {"words": "b a"}}</tool_call>'
    answers = [
        {"index": index, "branch": branch, "reward": 1.0, "reward_parts": {"exact": 1.0, "format": 0.2},
         "num_tokens": 48, "finish": "stop", "num_shared": branch, "shared_with": branch - 1, "messages": [
            {**turn, "content": call},
            {"role": "tool", "name": f"sort{told}", "content": "a b", "call_id": "call-1"},
            {**turn, "content": f"Let me sort: {' '.join(rng.sample('abcdefghijklmnop', 9))}{told}", "reward": 0.5},
         ]} for index in range(2) for branch in range(2)
    ]  # fmt: skip
    prompt = f"Sort: {' '.join(rng.sample('abcdefghijklmnop', 9))}{told}"
    return {
        "step": 119, "group_id": number, "messages": [{"role": "user", "content": prompt}],
        "tools": ['{"name": "sort", "parameters": {"type": "object"}}'],
        "label": "a b c", "outcome": "kept", "reason": "", "source": "rollout/0", "wall_s": time.time(),
        "oldest_version": 118, "newest_version": 119, "answers": answers, "num_answers": 4, "is_held_out": False,
        "eval_set": "",
    }  # fmt: skip


def plant_seat(folder: Path, *, num_steps: int = 120) -> PlantedSeat:
    """A planted run with changes and samples, its clock moved to end now."""
    run_dir = plant_run(folder / "sort-planted", num_steps=num_steps, end="")
    plant_changes(run_dir)
    lines = (json.dumps(planted_group(1000 + number)) for number in range(6))
    (run_dir / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return PlantedSeat(run_dir)


@contextlib.asynccontextmanager
async def serving(seat: PlantedSeat) -> AsyncIterator[ControlNote]:
    """The control socket of a planted seat, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="seat-") as folder:
        context: Any = SimpleNamespace(node=SimpleNamespace(clock=SimpleNamespace(wall=time.time)))
        control = Path(folder) / "control.sock"
        server = ControlServer(context, seat.handlers(), seat.noted.append, control, limits=seat.limits)
        await server.open()
        note = ControlNote(run_dir=str(seat.run_dir), control=str(control), pid=os.getpid())
        note.save(seat.run_dir)
        try:
            async with Dashboard(server, seat.run_dir):
                yield note
        finally:
            await server.close()


async def _forever(folder: Path) -> None:
    seat = plant_seat(folder)
    async with serving(seat) as note:
        print(note.run_dir, flush=True)
        while True:
            await asyncio.sleep(1.0)
            seat.version += 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_forever(Path(sys.argv[1])))
