"""Who dies, what happens, on real GPUs: a trainer rank, an SGLang server, the coordinator, then everything at once.

    python chaos.py [--placement two|gang|colocated] [--backend megatron|torch] [--ranks 1] [--limit 400]
    python chaos.py --device cpu [--python INTERPRETER]

One run (`kill.toml`), each prompt to be trained on once. Placements:

    two         trainer on GPU 0 (GPUs 0 to RANKS - 1), two servers that share the next one, weights by NCCL
    gang        the same, but the two servers share the GPU of the gang's last rank
    colocated   one trainer rank and both servers on GPU 0, weights by CUDA IPC

In this order:

    trainer       SIGKILL of a rank in the middle of a step
    engine        SIGKILL of a server in the middle of a broadcast (as in `kill_in_broadcast.py`)
    coordinator   SIGKILL, by `myxa kill`
    everything    SIGKILL of the launcher and all that it started, then `myxa resume`

Then the run goes on to the end of its data. One table: who died, until it was back at work, how many steps the others
made meanwhile. The ledger is audited in the end: every prompt trained once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from figures import Report, number, parser, work_folder
from kill_in_broadcast import SPARED, VICTIM, WARM_VERSIONS, Trial, TrialFailedError, kill_in_broadcast, launch_command
from make_model import SHAPES, make_learner
from reverse_task import write_data
from run_figures import newest_run
from trial_runs import ends_of_logs, stage

from myxa.actors.models.tiny import PRESETS
from myxa.core.errors import MyxaError
from myxa.launch.control.client import ControlClient

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.harness.ledger_audit import audit_ledger

BATCH, BATCH_ON_CPU = 16, 4
STRIKE_AT = 8
"""Step in which the trainer dies."""
STEPS_MADE = "SELECT wall_s, detail FROM transitions WHERE to_state = 'TRAINED' AND detail LIKE 'version %'"
STEPS = {"two": 300, "gang": 300, "colocated": 600}
"""Of data: while a server starts again the other makes up to seven steps a second."""
RESUMED_STEPS = 3
"""Made after the resumption before the time counts as over and the end of the data is waited for."""


@dataclass
class Deaths:
    """What was done and seen."""

    trial: Trial
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    @property
    def ledger(self) -> Path:
        return self.trial.run_dir / "ledger.sqlite"

    def trained(self) -> list[tuple[float, str]]:
        """(wall time, version) of every group that was trained, as the ledger took it."""
        if not self.ledger.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{self.ledger}?mode=ro", uri=True)) as db:
            return db.execute(STEPS_MADE).fetchall()

    def step_times(self) -> list[float]:
        return [wall_s for wall_s, _ in self.trained()]

    def steps(self, since_s: float, until_s: float = float("inf")) -> int:
        """Steps that the ledger took in that time."""
        return len({version for wall_s, version in self.trained() if since_s < wall_s < until_s})

    def first(self, what: str, times: Callable[[], list[float]], killed_s: float) -> float:
        """Wait for a sign of work after a death; when it came."""
        self.trial.until(lambda: any(at > killed_s for at in times()), what)
        return min(at for at in times() if at > killed_s)

    def note(self, who: str, killed_s: float, back_s: float, what: str) -> None:
        self.rows.append((who, f"{back_s - killed_s:.1f}", str(self.steps(killed_s, back_s)), what))


def trainer_dies(deaths: Deaths, num_ranks: int) -> None:
    deaths.trial.until(lambda: deaths.steps(0.0) >= STRIKE_AT, "the trainer's strike")
    killed_s = time.time()
    ControlClient.of(deaths.trial.run_dir).ask("kill", target=f"trainer/{num_ranks - 1}", reason="benchmark")
    back_s = deaths.first("a step after the trainer's death", deaths.step_times, killed_s)
    who = f"trainer/{num_ranks - 1} of {num_ranks}, in a step"
    deaths.note(who, killed_s, back_s, "a step is made")


def engine_dies(deaths: Deaths) -> None:
    trial = deaths.trial
    since_s = time.time()
    trial.until(lambda: all(len(trial.adopted(n, since_s)) > 1 for n in (SPARED, VICTIM)), "both engines adopt")
    kill = kill_in_broadcast(trial)
    back_s = deaths.first(
        f"{VICTIM} serves again", lambda: [at for at, _ in trial.adopted(VICTIM, kill.wall_s)], kill.wall_s
    )
    deaths.note(f"{VICTIM}'s server, in mid-broadcast", kill.wall_s, back_s, "it serves a version")


def coordinator_dies(deaths: Deaths) -> None:
    killed_s = time.time()
    ControlClient.of(deaths.trial.run_dir).ask("kill", target="coordinator", reason="benchmark")
    attached = ("coordinator-attached",)
    back_s = deaths.first(
        "the coordinator is attached", lambda: [e["wall_s"] for e in deaths.trial.events(*attached)], killed_s
    )
    deaths.note("coordinator", killed_s, back_s, "all have reported in")


def everything_dies(deaths: Deaths, command: list[str], env: dict[str, str], log: Path) -> None:
    trial = deaths.trial
    everyone = [trial_process := psutil.Process(trial.process.pid), *trial_process.children(recursive=True)]
    killed_s = time.time()
    for process in everyone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    trial.process.wait()
    trial.until_gone(everyone)
    resumed_s = time.time()
    with log.open("ab") as file:
        trial.process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    back_s = deaths.first("a step after the resumption", deaths.step_times, resumed_s)
    deaths.note("everything", killed_s, back_s, "a step is made")
    trial.until(lambda: deaths.steps(back_s) >= RESUMED_STEPS, f"{RESUMED_STEPS} more steps")


def judge(report: Report, deaths: Deaths, num_prompts: int) -> None:
    audit = audit_ledger(deaths.ledger)
    report.table("Who died", ("who", "s until it worked again", "steps meanwhile", "that is"), deaths.rows)
    wrong = list(audit.problems)
    if audit.trained != Counter(range(num_prompts)):
        wrong.append(f"{len(audit.trained)} of {num_prompts} prompts were trained, {audit.states}, {audit.dropped}")
    report.say(f"- {num_prompts} prompts, each trained once: {'no' if wrong else 'yes'}; undone: {audit.num_rewound}")
    report.keep("deaths", [list(row) for row in deaths.rows])
    if wrong:
        report.failed("\n".join(wrong))


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    args = parser(__doc__)
    args.add_argument("--placement", choices=("two", "gang", "colocated"), default="two", help="who has which GPU")
    args.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    args.add_argument("--ranks", type=int, default=1, help="of the trainer")
    args.add_argument("--shape", choices=[*PRESETS, *SHAPES], default="")
    args.add_argument("--steps", type=int, default=0, help="of data; 0: as many as last until the end")
    args.add_argument("--limit", type=float, default=400.0, help="seconds")
    args.add_argument("--python", default="", help="with --device cpu: an interpreter that has SGLang")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args(argv)
    options.steps = options.steps or STEPS[options.placement]
    return options


def chaos_sets(options: argparse.Namespace) -> list[str]:
    """What this trial's run says beside `kill.toml`."""
    is_cpu = options.device == "cpu"
    sets = [
        "run.num_steps=0", "run.max_wall_s=0",
        "data.max_passes=1",
        "trainer.checkpoint_every=4", f"roles.trainer.count={options.ranks}", "roles.rollout.max_restarts=20",
    ]  # fmt: skip
    if not is_cpu and options.ranks > 1:
        last = options.ranks - 1
        engines = last if options.placement == "gang" else options.ranks
        sets += [f'roles.trainer.devices="0-{last}"', f'roles.rollout.env={{CUDA_VISIBLE_DEVICES="{engines}"}}']
    if not is_cpu and options.placement == "gang":
        sets += ["sglang.mem_fraction_static=0.2"]
    return sets


def main() -> None:
    options = options_of()
    is_cpu = options.device == "cpu"
    report = Report("chaos", is_dry=is_cpu)
    work = work_folder() / "chaos"
    stage(work, "kill.toml", launches=not is_cpu or bool(options.python))
    make_learner(work / "model", options.shape or ("2m" if is_cpu else "20m"), seed=0)
    num_prompts = options.steps * (BATCH_ON_CPU if is_cpu else BATCH)
    # Some are left out since they are held-out words.
    write_data(work / "data", 0, num_demonstrations=10, num_prompts=num_prompts + 100, num_heldout=10)
    prompts = work / "data" / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:num_prompts]))
    options.overrides = [*chaos_sets(options), *options.overrides]
    command, env = launch_command(options, work)
    log = work / "chaos.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    deaths = Deaths(Trial(work / "runs", process, time.monotonic() + options.limit))
    try:
        trial = deaths.trial
        trial.until(lambda: all(len(trial.adopted(n)) > WARM_VERSIONS for n in (SPARED, VICTIM)), "both engines work")
        trainer_dies(deaths, options.ranks)
        engine_dies(deaths)
        coordinator_dies(deaths)
        resume = [sys.executable, "-m", "myxa.launch", "resume", str(trial.run_dir), "--quiet", *program_of(command)]
        everything_dies(deaths, resume, env, log)
        status = trial.process.wait(max(1.0, trial.give_up_at - time.monotonic()))
        if status:
            raise TrialFailedError(f"the run ended with {status}")
    except (TrialFailedError, MyxaError, psutil.Error, subprocess.TimeoutExpired, ValueError) as error:
        report.table("Who died", ("who", "s until it worked again", "steps meanwhile", "that is"), deaths.rows)
        report.failed(f"{type(error).__name__}: {error}\n{ends_of_logs(log, newest_run(work / 'runs'))}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            deaths.trial.process.send_signal(signal.SIGINT)
            deaths.trial.process.wait(40)
    judge(report, deaths, num_prompts)
    report.say(f"- longest: {number(max(float(row[1]) for row in deaths.rows))} s")
    report.end()


def program_of(command: list[str]) -> list[str]:
    """The composition root, which a resumption does not remember."""
    at = command.index("--program")
    return command[at : at + 2]


if __name__ == "__main__":
    main()
