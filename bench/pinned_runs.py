"""Did a rebuild move a bit? Digests of a pinned set of deterministic runs, to be compared between two commits.

    python bench/pinned_runs.py write before.json [--only grpo,sft]     in a checkout of the one commit
    python bench/pinned_runs.py write after.json                        in a checkout of the other
    python bench/pinned_runs.py compare before.json after.json          exit status 1 if anything differs

Each run makes six steps of a tiny model in deterministic mode. Kept of each: the exported weights, the digests of the
weights as published, the samples of every step in the order of their batch, and the metrics of each step that no clock
decides (losses, gradient norms). `grpo_kill` loses all its processes after step 3 and is resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from reproducible import RUN_FILE, Differs, Digests, Repeat, RunFailed, write_task

from myxa.actors.models.tiny import make_tiny_model

STEPS = 6
MEGATRON_ON_CPU = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1] / "tests" / "backends")!r})
import megatron_on_cpu
megatron_on_cpu.install()
"""


@dataclass(frozen=True)
class Pinned:
    """One run: what it sets beside the common run file."""

    sets: tuple[str, ...] = ()
    other_model: str = ""
    """A second model folder is made from another seed; this key of the run file names it."""
    kill_at: int = 0
    sft: bool = False
    megatron: bool = False
    """On the CPU, by the tests' rewriting of megatron-core."""


def megatron(ranks: int, *sets: str) -> Pinned:
    return Pinned(('roles.trainer.kind="megatron"', f"roles.trainer.count={ranks}", *sets), megatron=True)


RUNS = {
    "grpo": Pinned(),
    "grpo_kill": Pinned(kill_at=3),
    "two_engines": Pinned(("roles.rollout.count=2",)),
    "fsdp2": Pinned(("roles.trainer.count=2", 'trainer.strategy="fsdp"')),
    "ddp2": Pinned(("roles.trainer.count=2",)),
    "mcore_tp2": megatron(2, "megatron.tp=2"),
    "mcore_pp2": megatron(2, "megatron.pp=2"),
    "ppo_critic": Pinned(('algo.kind="ppo"', "critic.enabled=true", "critic.lr=1e-3")),
    "kl_ref": Pinned(("algo.kl_coef=0.05",), other_model="algo.ref_path"),
    "opd": Pinned(('algo.kl_in="advantage"', "algo.kl_coef=1.0"), other_model="algo.ref_path"),
    "gspo": Pinned(('algo.kind="gspo"',)),
    "cispo": Pinned(('algo.kind="cispo"',)),
    "rloo": Pinned(('algo.kind="rloo"',)),
    "sft": Pinned(('algo.kind="sft"',), sft=True),
}


def run(name: str, pinned: Pinned, folder: Path) -> Digests:
    """The digests of one run. Raises RunFailed, or Differs if a step that was made twice was not the same."""
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    write_task(folder)
    sets = [f"run.num_steps={STEPS}", "trainer.checkpoint_every=2", *pinned.sets]
    if pinned.other_model:
        make_tiny_model(folder / "other", preset="0p5m", seed=7)
        sets.append(f'{pinned.other_model}="{folder / "other"}"')
    if pinned.megatron:
        (folder / "sitecustomize.py").write_text(MEGATRON_ON_CPU)
        sets.append(f'roles.trainer.env={{PYTHONPATH="{folder}"}}')
    run_file = RUN_FILE
    if pinned.sft:
        rows = (json.dumps({"prompt": f"say {number}", "label": f"word {number * 7 % 100}"}) for number in range(200))
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        (folder / "records.jsonl").touch()
        run_file = run_file.replace('[reward]\nfn = "judged.py:reward"\n', "").replace("num_samples = 4\n", "")
        run_file = run_file.replace('reward_post_process = "judged.py:record"\n', "")
        sets += ['data.answer_key="label"']
    (folder / "run.toml").write_text(run_file)
    return Repeat(folder, "run.toml", tuple(sets)).run(kill_at=pinned.kill_at)


def write(path: Path, only: list[str]) -> None:
    found = {}
    for name, pinned in RUNS.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="myxa-pinned-") as folder:
            try:
                digests = run(name, pinned, Path(folder))
            except (RunFailed, Differs) as error:
                sys.exit(f"{name}: {error}")
        print(f"{name:12} {digests.whole[:16]} {time.monotonic() - began:6.1f} s", flush=True)
        found[name] = asdict(digests)
        path.write_text(json.dumps(found, indent=1, sort_keys=True))


def compare(one: Path, other: Path) -> int:
    """The number of runs that differ or are only in one file."""
    first, second = json.loads(one.read_text()), json.loads(other.read_text())
    differing = 0
    for name in sorted(first | second):
        if name not in first or name not in second:
            print(f"{name:12} only in {one if name in first else other}")
            differing += 1
            continue
        parts = [part for part, value in first[name].items() if second[name].get(part) != value]
        print(f"{name:12} " + (f"differs in {', '.join(parts)}" if parts else "equal to the bit"))
        differing += bool(parts)
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", default="", help="names, separated by commas")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.verb == "write":
        write(options.file, [name for name in options.only.split(",") if name])
    else:
        sys.exit(1 if compare(*options.files) else 0)


if __name__ == "__main__":
    main()
