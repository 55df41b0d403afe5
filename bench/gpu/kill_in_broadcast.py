"""A server is killed in mid-broadcast: does the run name it, go on, replace it, and is no token ever stamped wrongly?

    python kill_in_broadcast.py [--placement two|colocated] [--backend megatron|torch] [--limit 180]
    python kill_in_broadcast.py --device cpu [--python INTERPRETER]

A run of `myxa up` (`kill.toml`): the trainer on GPU 0, two launched SGLang servers that share GPU 1, weights by NCCL in
many small buckets; "colocated": all on GPU 0, weights by CUDA IPC. This script reads the second server's log, in which
every request is noted as it is answered. When the third bucket of a version is in, the server's scheduler gets SIGKILL;
the server, which then has no engine, ends by itself. On a CPU the broadcast goes through gloo; the servers are the
stand-ins of the tests, or the real SGLang of `--python`.

From the run's own files: an event names the engine; the other one adopts further versions meanwhile; another
incarnation joins and is brought to the newest version; every token of every kept group bears a version that the
incarnation which made it had adopted. The guard, which compares log-probs with the trainer's, never complains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from figures import Report, number, parser, work_folder
from limited import is_alive
from make_model import SHAPES, make_learner
from reverse_task import write_data
from run_figures import lines, newest_run, read_run
from trial_runs import HERE, cpu_overrides, ends_of_logs, stage

from myxa.actors.ledger.file import decode_group
from myxa.actors.models.tiny import PRESETS

SPARED, VICTIM = "rollout/0", "rollout/1"
WARM_VERSIONS = 3
"""Adopted by both before the kill."""
KILL_AFTER = 3
"""Buckets of the version that are in."""
MORE_VERSIONS = 3
"""Adopted by the new incarnation before the run is ended."""
GONE_S = 30.0
RECEIVED = re.compile(r'"POST /update_weights_from_(distributed|tensor) HTTP/1.1" 200')
PAUSED, RESUMED = '"POST /pause_generation HTTP/1.1" 200', '"POST /continue_generation HTTP/1.1" 200'
NAMING = ("engine-fenced", "engine-gone")
STAND_IN = HERE.parents[1] / "tests" / "harness" / "stand_in"
REAL_STAND_INS = HERE.parents[1] / "tests" / "engines" / "sglang_cpu" / "standins"
ON_ONE_GPU = (
    'weights.channel="cuda_ipc"', "sglang.mem_fraction_static=0.2", 'roles.rollout.env={CUDA_VISIBLE_DEVICES="0"}',
)  # fmt: skip
ON_CPU = (
    'sglang.attention_backend="torch_native"', "sglang.disable_overlap_schedule=true",
    "sglang.mem_fraction_static=0.05", "sglang.max_total_tokens=8192",
)  # fmt: skip


class TrialFailedError(RuntimeError):
    """The run did not get as far as it should."""


@dataclass
class Trial:
    """The run and what is seen of it from outside."""

    runs: Path
    process: subprocess.Popen[bytes]
    give_up_at: float

    @property
    def run_dir(self) -> Path:
        found = newest_run(self.runs)
        if found is None:
            raise TrialFailedError("there is no run directory")
        return found

    def until(self, condition: Callable[[], bool], what: str, every_s: float = 0.05) -> None:
        """Wait. Raises TrialFailedError when the run ends before, or the time is over."""
        while not condition():
            if self.process.poll() is not None:
                raise TrialFailedError(f"the run ended with {self.process.returncode} before {what}")
            if time.monotonic() > self.give_up_at:
                raise TrialFailedError(f"the time is over before {what}")
            time.sleep(every_s)

    def until_gone(self, processes: list[psutil.Process]) -> None:
        """Wait. In a container nobody may be there to reap them: a zombie has gone. Raises TrialFailedError."""
        started_s = time.monotonic()
        while alive := [p for p in processes if is_alive(p)]:
            if time.monotonic() - started_s > GONE_S:
                raise TrialFailedError(f"these outlive SIGKILL: {alive}")
            time.sleep(0.05)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds, in order."""
        folder = newest_run(self.runs)
        return [e for e in lines(folder / "events.jsonl") if e["kind"] in kinds] if folder is not None else []

    def adopted(self, engine: str, after_s: float = 0.0) -> list[tuple[float, int]]:
        """(wall time, version)."""
        found = [e for e in self.events("weights-adopted") if e["source"] == engine and e["wall_s"] > after_s]
        return [(e["wall_s"], int(e["data"]["version"])) for e in found]

    def joined(self, engine: str) -> list[float]:
        """Wall times at which an incarnation reported in."""
        return [e["wall_s"] for e in self.events("engine-joined") if e["text"].startswith(f"{engine} ")]

    def named_after(self, killed_s: float) -> list[dict[str, Any]]:
        return [e for e in self.events(*NAMING) if e["wall_s"] > killed_s and e["text"].startswith(VICTIM)]

    def schedulers(self) -> list[int]:
        """Processes in which the victim's server computes; the server itself where it has no others."""
        logs = sorted((self.run_dir / "logs").glob(f"{VICTIM.replace('/', '.')}.[0-9]*.log"))
        found = [int(n) for log in logs for n in re.findall(r"is pid (\d+),", log.read_text(errors="replace"))]
        server = psutil.Process(found[-1])
        below = [
            p.pid for p in server.children(recursive=True) if " ".join(p.cmdline()).startswith("sglang::scheduler")
        ]
        return below or [server.pid]

    def has_worked(self, engine: str, after_s: float) -> bool:
        """Whether a group that was handed to it since then is kept."""
        with contextlib.closing(open_ledger(self.run_dir)) as db:
            sent = "SELECT group_id FROM transitions WHERE to_state = 'DISPATCHED' AND detail = ? AND wall_s > ?"
            kept = f"SELECT COUNT(*) FROM payloads WHERE is_whole AND group_id IN ({sent})"
            return bool(db.execute(kept, (engine, after_s)).fetchone()[0])

    @property
    def server_log(self) -> Path:
        return self.run_dir / "logs" / f"{VICTIM.replace('/', '.')}.sglang.log"


@dataclass(frozen=True)
class Kill:
    """What was done, and when."""

    wall_s: float
    pids: tuple[int, ...]
    num_whole: int
    """Buckets that a version of this model has."""


def launch_command(options: argparse.Namespace, work: Path) -> tuple[list[str], dict[str, str]]:
    """`myxa up` of the run file, and its environment."""
    is_cpu = options.device == "cpu"
    sets = [f'roles.trainer.kind="{options.backend}"', f'run.dir="{work / "runs"}"']
    sets += ON_ONE_GPU if options.placement == "colocated" and not is_cpu else ()
    python_path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    if is_cpu:
        path = os.pathsep.join([str(REAL_STAND_INS if options.python else STAND_IN), python_path])
        sets += [
            *cpu_overrides(), "roles.rollout.threads=1", 'engine.dtype="float32"',
            f'roles.rollout.env={{PYTHONPATH="{path}", STAND_IN_ACCESS_LOG="1", CUDA_VISIBLE_DEVICES=""}}',
            "algo.batch_size=4", "engine.max_running=16", "rollout.max_groups=4",
        ]  # fmt: skip
        sets += [f'engine.python="{options.python}"', *ON_CPU] if options.python else []
    command = [sys.executable, "-m", "myxa.launch", "up", str(work / "kill.toml"), "--quiet"]
    sets += options.overrides
    command += ["--program", "shared_gpu:build_actor", *(word for item in sets for word in ("--set", item))]
    return command, {**os.environ, "PYTHONPATH": python_path}


def up(options: argparse.Namespace, work: Path) -> subprocess.Popen[bytes]:
    command, env = launch_command(options, work)
    with (work / "kill.log").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def running(options: argparse.Namespace, work: Path) -> Generator[Trial]:
    """The run; ended afterwards as by Ctrl-C."""
    process = up(options, work)
    try:
        yield Trial(work / "runs", process, time.monotonic() + options.limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def buckets_of_a_version(text: str) -> int:
    """Receptions between the first pause and the resumption after it, as the server's log tells."""
    begun = text.index(PAUSED)
    return len(RECEIVED.findall(text, begun, text.index(RESUMED, begun)))


def kill_in_broadcast(trial: Trial) -> Kill:
    """Read the server's log as it grows; SIGKILL when some, not all, of a version's buckets are in."""
    pids = trial.schedulers()
    num_whole = buckets_of_a_version(trial.server_log.read_text(errors="replace"))
    if num_whole <= KILL_AFTER + 1:
        raise TrialFailedError(f"a version has {num_whole} buckets: too few to be killed between them")
    num_received, rest = -1, ""
    with trial.server_log.open(errors="replace") as log:
        log.seek(0, os.SEEK_END)

        def is_in_the_middle() -> bool:
            nonlocal num_received, rest
            *whole, rest = (rest + log.read()).split("\n")
            for line in whole:
                if PAUSED in line:
                    num_received = 0
                elif RESUMED in line:
                    num_received = -1
                elif RECEIVED.search(line) and num_received >= 0:
                    num_received += 1
            return KILL_AFTER <= num_received < num_whole - 1

        trial.until(is_in_the_middle, "a broadcast was seen in the middle", every_s=0.0005)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return Kill(wall_s=time.time(), pids=tuple(pids), num_whole=num_whole)


# -- afterwards, from the run's files ----------------------------------------------------------------------------------


def open_ledger(run_dir: Path) -> sqlite3.Connection:
    """To be read, also while the run goes on."""
    return sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)


def stamps(run_dir: Path) -> list[tuple[str, tuple[float, ...], frozenset[int]]]:
    """Every kept group: who made it, when it was handed to an engine, the versions of its tokens."""
    found: list[tuple[str, tuple[float, ...], frozenset[int]]] = []
    with contextlib.closing(open_ledger(run_dir)) as db:
        sent: dict[int, list[tuple[str, float]]] = {}
        dispatches = "SELECT group_id, detail, wall_s FROM transitions WHERE to_state = 'DISPATCHED' ORDER BY seq"
        for group_id, engine, wall_s in db.execute(dispatches):
            sent.setdefault(group_id, []).append((engine, wall_s))
        for group_id, data in db.execute("SELECT group_id, data FROM payloads WHERE is_whole"):
            group = decode_group(group_id, data)
            versions = frozenset(int(v) for sample in group.samples for v in sample.versions if v >= 0)
            engine = sent[group_id][-1][0]
            found.append((engine, tuple(wall_s for name, wall_s in sent[group_id] if name == engine), versions))
    return found


def wrong_stamps(trial: Trial, seen: Mapping[str, list[int]]) -> list[str]:
    """Groups with a version that the incarnation which made them never adopted; counts groups into `seen`."""
    wrong: list[str] = []
    held: dict[str, list[tuple[float, frozenset[int]]]] = {}
    for engine in (SPARED, VICTIM):
        joins = trial.joined(engine)
        ends = [*joins[1:], float("inf")]
        held[engine] = [
            (start_s, frozenset(v for wall_s, v in trial.adopted(engine) if start_s < wall_s < end_s))
            for start_s, end_s in zip(joins, ends, strict=True)
        ]
    for engine, sent_s, versions in stamps(trial.run_dir):
        life = sum(start_s <= sent_s[-1] for start_s, _ in held[engine]) - 1
        seen[engine][max(life, 0)] += 1
        if extra := versions - held[engine][max(life, 0)][1]:
            wrong.append(f"a group of {engine}, life {life}, bears versions {sorted(extra)}, which it never had")
    return wrong


def judge(report: Report, trial: Trial, kill: Kill) -> None:
    """All questions of the module's head."""
    problems: list[str] = []
    named = trial.named_after(kill.wall_s)
    back_s = trial.joined(VICTIM)[-1]
    log = trial.server_log.read_text(errors="replace")
    held_before = [v for wall_s, v in trial.adopted(VICTIM) if wall_s < kill.wall_s]
    first_back = trial.adopted(VICTIM, back_s)[0]
    steps = {version: wall_s for version, (wall_s, _) in read_run(trial.run_dir).steps.items()}
    newest = max((v for v, wall_s in steps.items() if wall_s <= back_s), default=0)
    meanwhile = [v for wall_s, v in trial.adopted(SPARED, kill.wall_s) if wall_s < back_s]
    if not meanwhile or max(meanwhile) <= held_before[-1] + 1:
        problems.append(f"{SPARED} adopted {meanwhile} meanwhile: the run did not go on")
    if first_back[1] < newest:
        problems.append(f"{VICTIM} came back with version {first_back[1]}, when {newest} was there")
    if paused := trial.events("run-paused"):
        problems.append(f"the guard complains: {paused[0]['text']}")
    seen: dict[str, list[int]] = {name: [0] * len(trial.joined(name)) for name in (SPARED, VICTIM)}
    wrong = wrong_stamps(trial, seen)
    problems += wrong[:5]
    problems += [f"{name} made no group in a life: {counts}" for name, counts in seen.items() if not all(counts)]
    rows = [
        ("buckets of a version; in when the scheduler was killed", f"{kill.num_whole}; {_torn(log)}"),
        ("last version of the killed one", str(held_before[-1])),
        ("told of it", f"{named[0]['kind']}: {named[0]['text'][:160]}"),
        ("seconds until it was named", number(named[0]["wall_s"] - kill.wall_s)),
        ("seconds until another incarnation joined", f"{back_s - kill.wall_s:.1f}"),
        ("seconds until it served", f"{first_back[0] - kill.wall_s:.1f}"),
        ("version with which it came back; the newest when it joined", f"{first_back[1]}; {newest}"),
        ("versions adopted by the other one meanwhile", f"{len(meanwhile)} ({meanwhile[:1]} to {meanwhile[-1:]})"),
        ("longest pause between two steps", f"{_longest(sorted(steps.values())):.1f} s"),
        ("kept groups of each life", "; ".join(f"{name} {counts}" for name, counts in seen.items())),
        ("groups with a version that their engine did not have", str(len(wrong))),
    ]  # fmt: skip
    report.table("Killed in mid-broadcast", ("", ""), rows)
    if problems:
        report.failed("\n".join(problems))


def _torn(log: str) -> int:
    """Buckets received after a pause that was never followed by a resumption of the same life."""
    for part in log.split(PAUSED)[1:]:
        if RESUMED not in part and RECEIVED.search(part):
            return len(RECEIVED.findall(part))
    return 0


def _longest(walls: list[float]) -> float:
    return max((b - a for a, b in pairwise(walls)), default=0.0)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    args.add_argument("--placement", choices=("two", "colocated"), default="two", help="GPUs: two, or a shared one")
    args.add_argument("--shape", choices=[*PRESETS, *SHAPES], default="")
    args.add_argument("--limit", type=float, default=180.0, help="seconds")
    args.add_argument("--python", default="", help="with --device cpu: an interpreter that has SGLang")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report("kill", is_dry=is_cpu)
    work = work_folder() / "kill"
    stage(work, "kill.toml", launches=not is_cpu or bool(options.python))
    make_learner(work / "model", options.shape or ("2m" if is_cpu else "20m"), seed=0)
    write_data(work / "data", 0, num_demonstrations=10, num_prompts=20_000, num_heldout=10)
    try:
        with running(options, work) as trial:
            trial.until(
                lambda: all(len(trial.adopted(name)) > WARM_VERSIONS for name in (SPARED, VICTIM)), "both engines work"
            )
            trial.until(lambda: trial.has_worked(VICTIM, 0.0), f"{VICTIM} made a group", every_s=0.5)
            begun_s = time.monotonic() - (trial.give_up_at - options.limit)
            report.say(f"- both engines had {WARM_VERSIONS} versions, and groups, {begun_s:.0f} s after the start")
            kill = kill_in_broadcast(trial)
            report.say(f"- process {kill.pids} of {VICTIM} got SIGKILL")
            trial.until(lambda: bool(trial.named_after(kill.wall_s)), f"{VICTIM} was named")
            trial.until(lambda: trial.joined(VICTIM)[-1] > kill.wall_s, f"{VICTIM} came back")
            back_s = trial.joined(VICTIM)[-1]
            trial.until(
                lambda: len(trial.adopted(VICTIM, back_s)) > MORE_VERSIONS, f"{VICTIM} served {MORE_VERSIONS} more"
            )
            trial.until(lambda: trial.has_worked(VICTIM, back_s), f"{VICTIM} made a group", every_s=0.5)
    except (TrialFailedError, psutil.Error, ProcessLookupError, ValueError) as error:
        report.failed(f"{type(error).__name__}: {error}\n{ends_of_logs(work / 'kill.log', newest_run(work / 'runs'))}")
    judge(report, trial, kill)
    report.end()


if __name__ == "__main__":
    main()
