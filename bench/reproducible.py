"""Two runs, one curve: is a deterministic run's repetition equal to the bit?

    python bench/reproducible.py [--steps 30] [--layouts 1x1,2x1,1x2] [--kill]

A layout is ENGINESxRANKS. Each is run twice from one run file (`rollout.deterministic = true`,
`async.max_staleness = 0`, about one group in five is filtered and replaced); with `--kill` every process of the second
run is killed half-way and the run is resumed from a checkpoint some steps back. Prints a digest of each run over the
final weights, over all samples that were trained on (tokens, log-probs, versions, rewards, in the order of the batches)
and over what the steps told, wall-clock figures left out. Exit status 1 if two runs of a layout differ, if a step that
was made again after the kill differs from its first time, or if layouts with the same number of ranks differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from myxa.actors.models.tiny import make_tiny_model

RUN_S = 600.0
GOES_ON_S = 0.25
NUM_PROMPTS = 400
RUN_FILE = """
[run]
name = "repeat"
dir = "runs"
seed = 7

[model]
path = "model"

[data]
train = "prompts.jsonl"

[rollout]
deterministic = true
num_samples = 4
max_new_tokens = 24
max_groups = 8
stop_token_ids = [97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108] # lengths differ

[reward]
fn = "judged.py:reward"

[algo]
batch_size = 8
minibatches = 2
reward_post_process = "judged.py:record"

[async]
max_staleness = 0

[optimizer]
lr = 1e-3

[trainer]
checkpoint_every = 5

[monitor]
tensorboard = false
"""
JUDGED = '''
"""One answer in three is right, by its checksum, however much is learnt; and a record of all that is trained on."""

import hashlib
import json
import os
import time
import zlib


def reward(completion):
    time.sleep(completion.group_id % 3 * 0.004)  # groups do not finish in the order in which they began
    # By prompt and member too: an answer that was right once is worth nothing to others.
    answer = f"{completion.prompt}/{completion.index}/{completion.text}"
    return float(zlib.crc32(answer.encode()) % 3 == 0)


def record(groups):
    hold = os.path.join(FOLDER, "hold")
    while str(groups[0].oldest_version()) in os.listdir(hold):
        time.sleep(0.05)
    with open(os.path.join(FOLDER, "records.jsonl"), "a") as file:
        for group in groups:
            digest = hashlib.sha256(group.rewards.tobytes())
            for one in group.samples:
                for array in (one.prompt_ids, one.response_ids, one.logprobs, one.loss_mask, one.versions):
                    digest.update(array.tobytes())
                digest.update(one.finish.encode())
            file.write(json.dumps([group.oldest_version(), group.prompt.draw, digest.hexdigest()]) + "\\n")
    return [group.rewards for group in groups]
'''
WALL_CLOCK = "_s"
"""How the names of figures end that a clock decides: step_s, tokens_per_s."""


class Differs(Exception):
    """What is not equal, in words."""


class RunFailed(Exception):
    """What the run said in the end."""


@dataclass(frozen=True)
class Digests:
    """Of one run; hex."""

    weights: str
    steps: dict[int, list[str]]
    """Step -> its groups in the order of the batch, "draw digest"."""
    told: dict[int, dict[str, float]]
    """Version -> the metrics of the step that made it."""
    published: dict[str, str]
    """Version -> digest of the weights as engines were given them; not part of `whole`."""

    @property
    def samples(self) -> str:
        return hashed(self.steps)

    @property
    def metrics(self) -> str:
        return hashed(self.told)

    @property
    def whole(self) -> str:
        return hashed([self.weights, self.samples, self.metrics])

    def differences(self, other: Digests) -> list[str]:
        return [name for name in ("weights", "samples", "metrics") if getattr(self, name) != getattr(other, name)]

    def first_difference(self, other: Digests) -> str:
        """Where it begins."""
        weights = [v for v, digest in self.published.items() if other.published.get(v, digest) != digest]
        return f"{self._first(other)}; weights as published differ in versions {weights or 'none'}"

    def _first(self, other: Digests) -> str:
        for step, groups in self.steps.items():
            if groups != (theirs := other.steps.get(step, [])):
                return f"step {step} was made from {groups} and {theirs}"
            told, again = self.told.get(step + 1, {}), other.told.get(step + 1, {})
            names = sorted(name for name in told | again if told.get(name) != again.get(name))
            if names:
                pairs = "; ".join(f"{name} {told.get(name)!r} and {again.get(name)!r}" for name in names[:5])
                return f"step {step}, from the same samples: {pairs}"
        return "the weights alone"


def hashed(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -- what a run left


def digests_of(run_dir: Path, records: Path) -> Digests:
    weights = hashlib.sha256()
    for file in sorted((run_dir / "export").glob("*.safetensors")):
        weights.update(file.read_bytes())
    return Digests(weights.hexdigest(), samples_of(records), metrics_of(run_dir), published_in(run_dir))


def published_in(run_dir: Path) -> dict[str, str]:
    """As the trainer's log tells."""
    found: dict[str, str] = {}
    for log in (run_dir / "logs").glob("trainer*"):
        found |= dict(re.findall(r"weight version (\d+) is published .* digest (\S+)", log.read_text(errors="replace")))
    return found


def samples_of(records: Path) -> dict[int, list[str]]:
    """Raises Differs if a step that was made twice was not the same both times."""
    steps: dict[int, list[str]] = {}
    batches: list[tuple[int, list[str]]] = []
    for line in records.read_text().splitlines():
        step, draw, digest = json.loads(line)
        group = f"{draw} {digest}"
        if not batches or batches[-1][0] != step or group == batches[-1][1][0]:
            batches.append((step, []))
        batches[-1][1].append(group)
    for step, batch in batches:
        earlier = steps.setdefault(step, batch)
        size = min(len(earlier), len(batch))  # the kill may have cut a record short
        if earlier[:size] != batch[:size]:
            raise Differs(f"step {step} was made from {earlier}, and after the kill again from {batch}")
        steps[step] = max(earlier, batch, key=len)
    return {step: steps[step] for step in sorted(steps)}


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """What each step told last."""
    found: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]:
        entry = json.loads(line)
        if "train/grad_norm" in entry["values"]:
            found[entry["step"]] = {k: v for k, v in entry["values"].items() if not k.endswith(WALL_CLOCK)}
    return found


# -- runs


@dataclass(frozen=True)
class Repeat:
    """A folder with a model, `write_task` and a run file."""

    folder: Path
    run_file: str
    sets: tuple[str, ...]

    @property
    def records(self) -> Path:
        return self.folder / "records.jsonl"

    @property
    def hold(self) -> Path:
        """A file in it has the number of a step as its name: the trainer does not leave that step while it is there."""
        return self.folder / "hold"

    def run(self, *, kill_at: int = 0, limit_s: float = RUN_S) -> Digests:
        """Run to the end. `kill_at`: just after that step every process is killed, and the run is resumed."""
        if kill_at:
            (self.hold / str(kill_at)).touch()
        sets = [part for item in self.sets for part in ("--set", item)]
        process = self._start("up", str(self.folder / self.run_file), *sets)
        give_up_at = time.monotonic() + limit_s
        try:
            if kill_at:
                self._into(kill_at, process, give_up_at)
                kill_everything(process)
                process = self._start("resume", str(self.run_dir()))
            status = process.wait(max(give_up_at - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the run did not end within {limit_s:.0f} s\n{self._log_end()}") from None
        finally:
            kill_everything(process)
        if status:
            raise RunFailed(f"the run ended with {status}\n{self._log_end()}")
        return digests_of(self.run_dir(), self.records)

    def run_dir(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "run.log").open("ab") as log:
            command = [sys.executable, "-m", "myxa.launch", *words, "--quiet"]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)

    def _into(self, step: int, process: subprocess.Popen[bytes], give_up_at: float) -> None:
        """Into the middle of a run: the trainer stands at that step until what the steps before it told is in the
        metrics, which come a second later, and goes on for a moment."""
        while not self.records.exists() or max(metrics_of(self.run_dir()), default=0) < step:
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RunFailed(f"step {step} was not reached\n{self._log_end()}")
            time.sleep(0.05)
        (self.hold / str(step)).unlink()
        time.sleep(GOES_ON_S)

    def _log_end(self) -> str:
        return (self.folder / "run.log").read_text(errors="replace")[-3000:]


def kill_everything(launcher: subprocess.Popen[bytes]) -> None:
    """SIGKILL to every process of a run at once; returns when all are gone."""
    if launcher.poll() is not None:
        return
    root = psutil.Process(launcher.pid)
    everyone = [root, *root.children(recursive=True)]
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    launcher.wait(60)
    psutil.wait_procs(everyone, timeout=20)


def write_task(folder: Path) -> None:
    """Prompts, and the reward that keeps a record."""
    (folder / "hold").mkdir(exist_ok=True)
    rows = (json.dumps({"prompt": f"say {number}", "label": ""}) for number in range(NUM_PROMPTS))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "judged.py").write_text(JUDGED.replace("FOLDER", repr(str(folder))))


def make(folder: Path, layout: str, options: argparse.Namespace) -> Repeat:
    engines, _, ranks = layout.partition("x")
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    write_task(folder)
    (folder / "run.toml").write_text(RUN_FILE)
    sets = (f"run.num_steps={options.steps}", f"roles.rollout.count={engines}", f"roles.trainer.count={ranks}")
    return Repeat(folder, "run.toml", (*sets, *options.overrides))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layouts", default="1x1,2x1", help="engines x trainer ranks, separated by commas")
    parser.add_argument("--kill", action="store_true", help="kill and resume the second run of each layout")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    wrong: list[str] = []
    first_of: dict[str, Digests] = {}
    print("| engines x ranks | run | seconds | digest | weights | samples | metrics |\n|---|---|---|---|---|---|---|")
    for layout in options.layouts.split(","):
        found: list[Digests] = []
        for name in ("first", "killed and resumed" if options.kill else "second"):
            kill_at = options.steps // 2 + 1 if found and options.kill else 0
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="myxa-repeat-") as folder:
                try:
                    one = make(Path(folder), layout, options).run(kill_at=kill_at)
                except (RunFailed, Differs) as error:
                    sys.exit(f"{layout}, {name}: {error}")
            parts = " | ".join(part[:12] for part in (one.weights, one.samples, one.metrics))
            print(f"| {layout} | {name} | {time.monotonic() - began:.1f} | {one.whole} | {parts} |", flush=True)
            found.append(one)
        for other, what in (
            (found[1], "the second run"),
            (first_of.setdefault(layout.partition("x")[2], found[0]), "another number of engines"),
        ):
            if different := found[0].differences(other):
                wrong.append(f"{layout}, {what}: {', '.join(different)} differ; {found[0].first_difference(other)}")
    print("\n" + ("\n".join(wrong) or "equal to the bit"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
