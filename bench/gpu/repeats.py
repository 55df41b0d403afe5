"""Two runs of one file on one GPU, the second killed half-way and resumed: are they equal to the bit?

    python repeats.py [--steps 30] [--backend megatron|torch] [--shape 20m] [--device cpu]

`repeats.toml` is run twice: SGLang in its deterministic mode and the trainer share GPU 0. Once the second run has made
half its steps every process of it is killed, and it is resumed from a checkpoint some steps back. Digests as in
`../reproducible.py`: final weights, all samples that were trained on, what the steps told without wall-clock figures.
On a CPU: our engine and the torch trainer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from figures import Report, parser, part_seconds, work_folder
from make_model import SHAPES, make_learner
from run_looks import ends_of_logs
from trial_runs import cpu_overrides, stage

from myxa.actors.models.tiny import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reproducible import Differs, Digests, Repeat, RunFailed, write_task

RUN_FILE = "repeats.toml"


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--steps", type=int, default=30)
    args.add_argument("--no-kill", action="store_true", help="the second run is left alone, as the first")
    args.add_argument("--backend", choices=("torch", "megatron"), default="megatron")
    args.add_argument("--shape", choices=[*PRESETS, *SHAPES], default="")
    args.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = args.parse_args()
    is_cpu = options.device == "cpu"
    report = Report("reproducible", is_dry=is_cpu)
    give_up_at = time.monotonic() + part_seconds(600.0)
    sets = [f"run.num_steps={options.steps}", f'roles.trainer.kind="{options.backend}"']
    if is_cpu:
        sets += [
            *cpu_overrides(), 'roles.trainer.kind="torch"', 'roles.rollout.kind="embedded"', 'engine.dtype="float32"',
            'roles.rollout.devices="cpu"', "roles.rollout.threads=1", "algo.batch_size=4", "rollout.num_samples=4",
        ]  # fmt: skip
    found: list[Digests] = []
    rows: list[tuple[str, ...]] = []
    second = ("second", 0) if options.no_kill else ("second, killed and resumed", options.steps // 2 + 1)
    for name, kill_at in (("first", 0), second):
        folder = work_folder() / f"repeats{len(rows)}"
        stage(folder, RUN_FILE, launches=not is_cpu)
        make_learner(folder / "model", options.shape or ("0p5m" if is_cpu else "20m"), seed=0)
        write_task(folder)
        repeat = Repeat(folder, RUN_FILE, (*sets, *options.overrides))
        began = time.monotonic()
        try:
            found.append(repeat.run(kill_at=kill_at, limit_s=max(give_up_at - began, 5.0)))
        except (RunFailed, Differs) as error:
            report.failed(f"{name}: {error}\n{ends_of_logs(folder / 'run.log', repeat.run_dir())}")
        if (made := max(found[-1].told, default=0)) != options.steps:
            report.failed(f"{name}: the run ended after step {made} of {options.steps}")
        parts = (found[-1].weights, found[-1].samples, found[-1].metrics)
        row = (name, f"{time.monotonic() - began:.1f}", found[-1].whole, *(part[:12] for part in parts))
        rows.append(row)
        report.say(f"- {', '.join(row)}")
        report.keep(name, found[-1].whole)
    report.table(f"{options.steps} steps, twice", ("run", "s", "digest", "weights", "samples", "metrics"), rows)
    different = found[0].differences(found[1])
    report.say(f"- equal to the bit: {'no, ' + ', '.join(different) + ' differ' if different else 'yes'}")
    if different:
        report.failed(f"{', '.join(different)} differ; {found[0].first_difference(found[1])}")
    report.end()


if __name__ == "__main__":
    main()
