"""`myxa up` for benchmarks: run files with what differs between machines put in by `--set`."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Report, parser, work_folder
from make_model import SHAPES
from reverse_task import write_data
from run_figures import lines, newest_run
from run_looks import ends_of_logs, look, stands_still
from servers import START_S, Server, running

from myxa.actors.models.tiny import PRESETS
from myxa.core.config.run import EngineSettings

HERE = Path(__file__).resolve().parent
AS_LAUNCHED = ("--incremental-streaming-output", "--stream-interval", "32")
"""How rollout actors start their servers."""
END_S = 15.0
"""For a run that is told to end."""


@dataclass(frozen=True)
class Choice:
    """What the command line chose."""

    is_cpu: bool
    engine: str
    backend: str
    channel: str = ""
    placement: str = "colocated"
    num_gpus: int = 1
    """With `halves`: of the trainer and the engines together."""
    overrides: tuple[str, ...] = ()

    @property
    def launches(self) -> bool:
        return self.engine == "launched" and not self.is_cpu

    @property
    def engine_gpu(self) -> int:
        return int(self.placement == "two")

    @property
    def num_engines(self) -> int:
        return self.num_gpus // 2 if self.placement == "halves" else 1


class RunFailedError(RuntimeError):
    """`myxa up` did not end well; the text holds the ends of its logs, and what a run that had to be ended said of
    itself."""

    def __init__(self, text: str, run_dir: Path | None) -> None:
        super().__init__(text)
        self.run_dir = run_dir


def add_choices(parser: argparse.ArgumentParser, *, with_halves: bool = False) -> None:
    placements = ("colocated", "two", *(("halves",) if with_halves else ()))
    halves = ", or a half for the trainer's ranks and a half for engines" if with_halves else ""
    parser.add_argument("--placement", choices=placements, default="colocated", help=f"GPUs: shared, or two{halves}")
    parser.add_argument("--gpus", type=int, default=2, help="of both halves" if with_halves else argparse.SUPPRESS)
    parser.add_argument("--engine", choices=("launched", "attach", "embedded"), default="launched",
                        help="SGLang started by the rollout actor, by this script, or our own engine")  # fmt: skip
    parser.add_argument("--backend", choices=("torch", "megatron"), default="torch")
    parser.add_argument("--channel", default="", help="of the weights; empty: as the run file says")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")


def add_learner(parser: argparse.ArgumentParser) -> None:
    """Which model from nothing, and how long it imitates before it learns."""
    parser.add_argument("--shape", choices=[*PRESETS, *SHAPES], default="20m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=300)


def chosen(args: argparse.Namespace) -> Choice:
    return Choice(
        is_cpu=args.device == "cpu",
        engine=args.engine,
        backend=args.backend,
        channel=args.channel,
        placement=args.placement,
        num_gpus=args.gpus,
        overrides=tuple(args.overrides),
    )


def attach_override(url: str) -> str:
    """The key that names running servers."""
    return f'engine.attach=["{url}"]' if "attach" in EngineSettings.model_fields else f'engine.url="{url}"'


def overrides(choice: Choice, url: str) -> list[str]:
    """For the reinforcement stage; the run files hold what a GPU machine needs."""
    found = [trainer_override(choice)]
    if url:
        found.append(attach_override(url))
    if choice.engine == "embedded":
        found.append('roles.rollout.kind="embedded"')
    if choice.is_cpu:
        found += cpu_overrides()
        found += ['roles.rollout.devices="cpu"', "roles.rollout.threads=1", 'engine.dtype="float32"']
    if choice.channel:
        found.append(f'weights.channel="{choice.channel}"')
    return [*found, *choice.overrides]


def placement_overrides(choice: Choice) -> list[str]:
    """Who has which GPUs, for run files that have both on the first one."""
    if choice.placement == "two":
        return ['roles.rollout.devices="1"']
    if choice.placement == "colocated":
        return []
    half = choice.num_engines
    return [
        f"roles.trainer.count={half}", f'roles.trainer.devices="0-{half - 1}"',
        f"roles.rollout.count={half}", f'roles.rollout.devices="{half}-{2 * half - 1}"',
    ]  # fmt: skip


def trainer_override(choice: Choice) -> str:
    return f'roles.trainer.kind="{choice.backend}"'


def cpu_overrides() -> list[str]:
    return ['roles.trainer.devices="cpu"', "roles.trainer.threads=1", 'trainer.dtype="float32"']


def server_for(
    choice: Choice, model: Path, log: Path, *, mem_fraction: float, extra: Sequence[str] = (), **more: Any
) -> Server:
    """A server to attach to, not started, with what a launched one would have; `more`: fields of `Server`."""
    return Server(
        folder=model, log=log, is_sglang=not choice.is_cpu, gpu=choice.engine_gpu, mem_fraction=mem_fraction,
        extra=(*AS_LAUNCHED, *extra), **more,
    )  # fmt: skip


@contextlib.contextmanager
def engine_for(choice: Choice, model: Path, log: Path, *, mem_fraction: float) -> Generator[Server | None]:
    """`server_for`, started and not waited for; None when the run brings its own engine."""
    if choice.engine != "attach":
        yield None
        return
    with running(server_for(choice, model, log, mem_fraction=mem_fraction)) as server:
        yield server


def up(run_file: Path, sets: Sequence[str], *, limit_s: float, still_s: float = 0.0, more: Sequence[str] = ()) -> Path:
    """One run into `<folder>/runs/<name>`, started with the arguments `more`; its run directory. It is ended `limit_s`
    after all engines serve (which may take START_S, while a fresh machine compiles kernels), or when it has told
    nothing for `still_s` (0: it may); what it says of itself is asked for before. Raises RunFailedError."""
    runs = run_file.parent / "runs" / run_file.stem
    older = set(runs.iterdir()) if runs.is_dir() else set[Path]()
    command = [sys.executable, "-m", "myxa.launch", "up", str(run_file), "--quiet", *more, "--set", f'run.dir="{runs}"']
    for item in sets:
        command += ["--set", item]
    log = run_file.with_suffix(".log")
    looked = ""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        status: int | str | None = None
        give_up_at, is_loading = time.monotonic() + limit_s + START_S, True
        while status is None:
            try:
                status = process.wait(min(1.0, max(give_up_at - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                if is_loading and has_begun(newest_run(runs, older)):
                    give_up_at, is_loading = time.monotonic() + limit_s, False
                if time.monotonic() >= give_up_at:
                    status = f"nothing within {limit_s:g} s"
                elif still_s and stands_still(newest_run(runs, older), still_s):
                    status = f"nothing: it stood still for {still_s:g} s"
        if isinstance(status, str):
            looked = f"{look(newest_run(runs, older))}\n"
            end(process)
    run_dir = newest_run(runs, older)
    if status != 0 or run_dir is None:
        raise RunFailedError(f"{run_file.name} ended with {status}\n{looked}{ends_of_logs(log, run_dir)}", run_dir)
    return run_dir


def imitated(choice: Choice, work: Path, sets: Sequence[str], *, limit_s: float) -> Path:
    """The supervised run `learn_sft.toml` of the work folder; its run directory, which is `work/sft` from then on.
    Raises RunFailedError."""
    more = [trainer_override(choice), *(cpu_overrides() if choice.is_cpu else ())]
    run_dir = up(work / "learn_sft.toml", [*sets, *more], limit_s=limit_s)
    link = work / "sft"
    link.unlink(missing_ok=True)
    link.symlink_to(run_dir)
    return run_dir


def has_begun(run_dir: Path | None) -> bool:
    """Its trainer and its engines are there."""
    if run_dir is None:
        return False
    return any(one["kind"] == "phase" and one["text"].endswith("-> running") for one in lines(run_dir / "events.jsonl"))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, kill."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    process.kill()
    process.wait()


def stage(work: Path, *names: str, launches: bool = False) -> None:
    """Copy run files and code into the work folder: relative paths in them mean its files.

    `[sglang]` is for servers that the run launches, and refused in others: unless it `launches`, it is left out.
    """
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith(".toml") and not launches:
            (work / name).write_text(without_table((HERE / name).read_text(encoding="utf-8"), "sglang"))
        else:
            shutil.copyfile(HERE / name, work / name)


def without_table(text: str, table: str) -> str:
    """A run file without one of its tables."""
    kept: list[str] = []
    is_in = False
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            is_in = line.strip() == f"[{table}]"
        if not is_in:
            kept.append(line)
    return "".join(kept)


def facts_of(run_dir: Path) -> str:
    """What the trainer said of itself."""
    for event in lines(run_dir / "events.jsonl"):
        if event["kind"] == "trainer-ready":
            return ", ".join(f"{key} {value}" for key, value in event["data"].items())
    return "the trainer never was ready"


def learner_parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a part that learns the task from nothing."""
    args = parser(doc)
    add_choices(args)
    add_learner(args)
    return args


def begun(name: str, args: argparse.ArgumentParser) -> tuple[argparse.Namespace, Choice, Report, Path, Stopwatch]:
    """Such a part: what was chosen, and its folder with run files and data of the task."""
    options = args.parse_args()
    choice = chosen(options)
    report, work = Report(name, is_dry=choice.is_cpu), work_folder() / name
    stage(work, "learn_sft.toml", "learn_colocated.toml")
    write_data(work / "data", options.seed, num_demonstrations=39_000, num_prompts=40_000, num_heldout=256)
    return options, choice, report, work, Stopwatch(report)


class Stopwatch:
    """Seconds of the stages of a part."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last_s = time.monotonic()

    def lap(self, what: str) -> None:
        now_s = time.monotonic()
        self._report.say(f"- {what}: {now_s - self._last_s:.1f} s")
        self._last_s = now_s
