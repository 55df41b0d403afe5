"""From "the optimizer is done" to "the first token of the new version", and how long generation stood still for it.

    python weights_latency.py [--placement colocated|two] [--channels nccl,disk] [--shape 0.6b] [--updates 12]

One run of the real actors per channel (`async20.toml` with short answers: many versions), all attached to one SGLang
server, which streams every token. A client of its own reads one endless stream of that server: what it sees is
what a user would see.

    first token   from the end of the optimizer step (the trainer's trace) to the first token that the server stamps
                  with the new version, as this client receives it
    stall         the longest silence between two tokens while the version was committed, minus the usual silence

Afterwards the server's own checksum of all its weights is taken, the folder that the trainer exported at its end is
loaded by the server, and the checksum is taken again: equal means that every byte that the channel brought was right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async20 import write_prompts
from figures import Report, median, parser, work_folder
from make_model import make_apart
from servers import Server, ServerDiedError, running
from trial_runs import Choice, RunFailedError, overrides, placement_overrides, stage, up

from myxa.actors.sinks.chrome_trace import TRACE_FILE

SKIPPED_UPDATES = 4
"""The first ones compile kernels, open channels and fill allocators."""
LAST_UPDATES = 1
"""The last one is taken in while the trainer writes its export."""
NEAR_S = 0.02
"""So long before and after a commit silences count as its own; versions may follow each other closely."""
GOALS = {"0.6b": (60.0, 25.0), "4b": (250.0, None)}
"""ms to the first token, ms of stall."""


@dataclass(frozen=True)
class Token:
    """A chunk as it came."""

    wall_s: float
    version: int
    gap_s: float
    """Silence before it; 0 for the first of a stream."""


@dataclass(frozen=True)
class Update:
    """One version, from the optimizer to the reader."""

    version: int
    first_token_s: float
    """From the end of the optimizer step; the sum of the next four."""
    publish_s: float
    announce_s: float
    """From published to the begin of the commit: buffer, coordinator, preparation."""
    commit_s: float
    resume_s: float
    """From the end of the commit to the token; negative when the token was faster than the commit's answer."""
    stall_s: float


# -- the reader's side -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def probing(url: str, notes: Path, vocab_size: int, num_new: int) -> Generator[None]:
    """The probe's process, while this lasts."""
    notes.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("stream_probe.py")), url, str(notes), str(vocab_size)]
    process = subprocess.Popen([*command, str(num_new)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_tokens(notes: Path) -> list[Token]:
    tokens: list[Token] = []
    before_s = 0.0
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ():
        if not line:
            before_s = 0.0
            continue
        wall, version, _ = line.split(",")
        wall_s = float(wall)
        known = int(version) if version.lstrip("-").isdigit() else -1
        tokens.append(Token(wall_s, known, wall_s - before_s if before_s else 0.0))
        before_s = wall_s
    return tokens


# -- the run's side ----------------------------------------------------------------------------------------------------


def spans(run_dir: Path, word: str) -> Iterator[tuple[int, float, float]]:
    """(number, start, end) of the trace's spans called "<word> <number>", wall seconds."""
    for event in json.loads((run_dir / TRACE_FILE).read_bytes()):
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and name.startswith(f"{word} ") and name.split()[-1].isdigit():
            yield int(name.split()[-1]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def usual_gaps(tokens: list[Token], commits: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, 99th percentile and largest silence away from commits, s; trainer and engine may share the GPU."""
    away = sorted(
        t.gap_s for t in tokens if t.gap_s and not any(a - NEAR_S <= t.wall_s <= b + 2 * NEAR_S for a, b in commits)
    )
    return (statistics.median(away), away[int(0.99 * (len(away) - 1))], away[-1]) if away else (0.0, 0.0, 0.0)


def find_updates(run_dir: Path, tokens: list[Token]) -> list[Update]:
    """Versions that the reader saw; those that came while it began another stream are left out."""
    done = {step + 1: end_s for step, _, end_s in spans(run_dir, "train")}
    published = {version: end_s for version, _, end_s in spans(run_dir, "publish")}
    commits = {version: (start_s, end_s) for version, start_s, end_s in spans(run_dir, "adopt")}
    usual_s = usual_gaps(tokens, list(commits.values()))[0]
    found: list[Update] = []
    versions = sorted(set(done) & set(published) & set(commits))
    for version in versions[SKIPPED_UPDATES : len(versions) - LAST_UPDATES]:
        start_s, end_s = commits[version]
        first = next((t for t in tokens if t.version == version and t.wall_s >= start_s), None)
        if first is None:
            continue
        until_s = max(end_s, first.wall_s) + NEAR_S
        near = [t for t in tokens if start_s - NEAR_S <= t.wall_s <= until_s]
        if any(t.gap_s == 0.0 for t in near):
            continue
        longest_s = max(t.gap_s for t in near)
        found.append(
            Update(
                version=version,
                first_token_s=first.wall_s - done[version],
                publish_s=published[version] - done[version],
                announce_s=start_s - published[version],
                commit_s=end_s - start_s,
                resume_s=first.wall_s - end_s,
                stall_s=longest_s - usual_s,
            )
        )
    return found


# -- the server's own word ---------------------------------------------------------------------------------------------


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def checksum(url: str) -> dict[str, str]:
    """Weight -> hash, over all ranks."""
    found: dict[str, str] = {}
    for rank, facts in enumerate(post(f"{url}/weights_checker", {"action": "checksum"})["ranks"]):
        found |= {f"{rank}:{name}": value for name, value in facts["checksums"].items()}
    return found


def compare_bytes(url: str, run_dir: Path, num_steps: int) -> str:
    """Whether the served weights are those of the exported folder, in words that begin with "equal" if so."""
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
            served = str(json.loads(answer.read()).get("weight_version"))
        if served != str(num_steps):
            return f"not compared: the server serves version {served}, the export is of {num_steps}"
        by_channel = checksum(url)
        body = {"model_path": str(run_dir / "export"), "weight_version": served}
        answered = post(f"{url}/update_weights_from_disk", body)
        if not answered.get("success"):
            return f"not compared: the export was refused: {answered.get('message')}"
        by_folder = checksum(url)
    except (OSError, urllib.error.URLError, KeyError, ValueError) as error:
        return f"not compared: {type(error).__name__}: {error}"
    wrong = [name for name, value in by_folder.items() if by_channel.get(name) != value]
    if wrong or set(by_channel) != set(by_folder):
        return f"DIFFERENT: {len(wrong)} of {len(by_folder)} tensors, first {wrong[:3]}"
    return f"equal, {len(by_folder)} tensors"


# -- one channel -------------------------------------------------------------------------------------------------------


def run_sets(choice: Choice, url: str, channel: str, num_steps: int) -> list[str]:
    """Short answers and small batches: a new version as often as the trainer can make one."""
    return [
        f"run.num_steps={num_steps}", "trainer.export_at_end=true", "algo.batch_size=4", "rollout.max_groups=8",
        "rollout.num_samples=4", f"rollout.max_new_tokens={8 if choice.is_cpu else 48}", f'run.name="{channel}"',
        "run.max_wall_s=100", "monitor.trace=true",
        *placement_overrides(choice), *overrides(choice, url),
    ]  # fmt: skip


def run_channel(report: Report, options: argparse.Namespace, channel: str, url: str, work: Path) -> list[Update] | None:
    is_cpu = options.device == "cpu"
    choice = Choice(
        is_cpu=is_cpu, engine="attach", backend=options.backend, placement=options.placement,
        channel=channel if options.sets_channel else "", overrides=tuple(options.overrides),
    )  # fmt: skip
    num_steps = options.updates + SKIPPED_UPDATES + LAST_UPDATES
    sets = run_sets(choice, url, channel, num_steps)
    notes = work / f"probe_{channel}.txt"
    with probing(url, notes, options.vocab_size, 200 if is_cpu else 600):
        started_s = time.monotonic()
        try:
            run_dir = up(work / "async20.toml", sets, limit_s=options.limit)
        except RunFailedError as error:
            report.say(f"- {channel}: FAILED: {error}")
            return None
        took_s = time.monotonic() - started_s
    tokens = read_tokens(notes)
    updates = find_updates(run_dir, tokens)
    told = "not asked" if is_cpu else compare_bytes(url, run_dir, num_steps)
    report.say(f"- {channel}: {took_s:.0f} s, {len(tokens)} chunks read, {len(updates)} updates seen; bytes: {told}")
    commits = [(start_s, end_s) for _, start_s, end_s in spans(run_dir, "adopt")]
    gaps_ms = [gap_s * 1e3 for gap_s in usual_gaps(tokens, commits)]
    report.say(
        f"  silences away from commits, ms: median {gaps_ms[0]:.1f}, p99 {gaps_ms[1]:.1f}, longest {gaps_ms[2]:.1f}"
    )
    report.keep(channel, {"updates": [asdict(u) for u in updates], "bytes": told, "gaps_ms": gaps_ms})
    if not is_cpu:
        is_equal = float(told.startswith("equal"))
        report.goal(f"{channel}: every byte of every weight is the trainer's (1 = yes)", is_equal, at_least=1.0)
    return updates


def tell(report: Report, options: argparse.Namespace, channel: str, updates: list[Update]) -> None:
    """Print a channel's figures at its end, so that a time limit in the next channel does not lose them."""

    def cell(values: list[float]) -> str:
        middle = median(values)
        return "-" if middle is None else f"{middle * 1e3:.1f} ({min(values) * 1e3:.1f}-{max(values) * 1e3:.1f})"

    parts = ("first_token_s", "publish_s", "announce_s", "commit_s", "resume_s", "stall_s")
    row = (channel, str(len(updates)), *(cell([getattr(update, part) for update in updates]) for part in parts))
    where = "another GPU" if options.placement == "two" else "the same GPU"
    report.table(
        f"{options.shape} bf16, engine on {where}; ms, median (range)",
        (
            *("channel", "updates", "optimizer done to first token", "of it publishing", "until the commit", "commit"),
            *("from there to the token", "stall"),
        ),
        [row],
    )
    first_ms, stall_ms = GOALS.get(options.shape, (None, None))
    if channel == "disk" or first_ms is None:
        return
    first, stall = median([u.first_token_s for u in updates]), median([u.stall_s for u in updates])
    report.goal(f"{channel}: ms to the first token", first and first * 1e3, at_most=first_ms)
    if stall_ms is not None:
        report.goal(f"{channel}: ms of stall", stall if stall is None else stall * 1e3, at_most=stall_ms)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--placement", choices=("colocated", "two"), default="colocated")
    args.add_argument("--channels", default="", help="empty: cuda_ipc,disk (one GPU) or nccl,disk (two)")
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--backend", default="torch")
    args.add_argument("--updates", type=int, default=12)
    args.add_argument("--limit", type=float, default=110.0, help="seconds a channel may take")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report(f"weights_{options.placement}_{options.shape}", is_dry=is_cpu)
    channels = options.channels or ("nccl,disk" if options.placement == "two" else "cuda_ipc,disk")
    options.sets_channel = not is_cpu or bool(options.channels)
    if is_cpu and not options.channels:
        channels = "disk"
    work = work_folder() / "weights"
    stage(work, "async20.toml", "spread_reward.py")
    config = make_apart(work / "model", "dry" if is_cpu else options.shape, options.device)
    options.vocab_size = config.vocab_size
    write_prompts(work / "data" / "prompts.jsonl", 2000, seed=1)
    server = Server(
        folder=work / "model", log=work / "server.log", is_sglang=not is_cpu, gpu=int(options.placement == "two"),
        mem_fraction=0.2, max_running=64, context_length=0 if is_cpu else 1024,
        extra=("--incremental-streaming-output",),
    )  # fmt: skip
    failed: list[str] = []
    with running(server):
        try:
            url = server.wait()
        except ServerDiedError as error:
            report.failed(str(error))
        for channel in channels.split(","):
            updates = run_channel(report, options, channel, url, work)
            if updates is None:
                failed.append(channel)
            else:
                tell(report, options, channel, updates)
    if failed:
        report.failed(", ".join(failed))
    report.end()


if __name__ == "__main__":
    main()
