"""Commands that need no run: `plan`, `schema`, `doctor`, `convert`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from .parser import Command, Parser, add_json_flag, at_least, positive, show

if TYPE_CHECKING:
    from rich.text import Text


def _add_plan(plan: Parser) -> None:
    plan.add_argument("file", nargs="+", metavar="RUN.TOML", help="run file; of several, later ones win key by key")
    plan.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                      help="overrule a value of the file; may be repeated")  # fmt: skip
    plan.add_argument("--nnodes", type=at_least(1), default=1, metavar="N", help="number of machines (%(default)s)")
    plan.add_argument("--device-gib", type=positive("GiB"), default=0.0, metavar="GIB",
                      help="memory of one GPU (what NVML says, where there is one)")  # fmt: skip
    plan.add_argument("--elsewhere", action="store_true",
                      help="the run will be started on another machine: do not look at this one's packages, "
                      "interpreters, devices, ports and disk")  # fmt: skip
    add_json_flag(plan)


def _plan(options: argparse.Namespace) -> int:
    from ..checks.plan import make_plan, plan_json, plan_text

    plan = make_plan(
        options.file,
        options.overrides,
        num_nodes=options.nnodes,
        device_gib=options.device_gib,
        is_here=not options.elsewhere,
    )

    def page(value: Any) -> Text | str:
        return _coloured(plan_text(plan))

    show(options, plan_json(plan), page)
    return 2 if plan.errors else 0


STYLES = ((r"== .*errors?$|.* OVER$|FAIL ", "bold red"), (r"== .*warnings?$|warn ", "yellow"), ("== ", "bold"))
"""Of lines that begin like that, at a terminal."""


def _coloured(text: str) -> Text | str:
    if not sys.stdout.isatty():
        return text
    from rich.text import Text

    lines = text.splitlines()
    styles = (next((style for like, style in STYLES if re.match(like, line)), "") for line in lines)
    return Text("\n").join(Text(line, style=style) for line, style in zip(lines, styles, strict=True))


def _schema(_: argparse.Namespace) -> int:
    from ...core.config.loading import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _add_doctor(doctor: Parser) -> None:
    doctor.add_argument("--dir", default="runs", metavar="DIR", help="where run directories will be made (%(default)s)")
    add_json_flag(doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ..checks.all_checks import findings_json, findings_text, judge
    from ..checks.machine import gather

    findings = judge(gather(options.dir))

    def page(value: Any) -> Text | str:
        return _coloured(findings_text(findings))

    show(options, findings_json(findings), page)
    return 1 if any(one.severity == "error" for one in findings) else 0


RUN_FILE = "config.toml"


def _add_convert(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's: the newest")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes; empty, or not there yet")
    parser.add_argument("--model", type=Path, default=None, metavar="DIR",
                        help="folder that the run started from (model.path of the run's own config.toml)")  # fmt: skip
    parser.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"), metavar="TYPE",
                        help="float32 or bfloat16 (as in the checkpoint)")  # fmt: skip
    add_json_flag(parser)


def _convert(options: argparse.Namespace) -> int:
    from ...actors.backends.convert import convert  # torch is needed here only
    from ..run_lineage.resume_point import named_checkpoint

    model = options.model or _model_of_run(options.checkpoint)
    checkpoint = named_checkpoint(options.checkpoint, reads_all=True)
    show(options, convert(checkpoint, model, options.folder, dtype=options.dtype), _convert_sentence)
    return 0


def _convert_sentence(done: dict[str, Any]) -> str:
    return (
        f"{done['folder']}: {done['num_tensors']} weights, {done['num_parameters']:,} values of {done['dtype']}, "
        f"from {done['checkpoint']} ({done['backend']}, {done['num_updates']} updates)"
    )


def _model_of_run(checkpoint: Path) -> Path:
    from ...core.config import load_config

    for place in (checkpoint, *checkpoint.absolute().parents[:2]):
        if (place / RUN_FILE).is_file():
            return Path(load_config([place / RUN_FILE], []).model.path)
    raise ConfigError(
        f"{checkpoint} does not lie in a run directory, so nothing says which model it is of",
        remedy="name the folder that the run started from with --model",
    )


PLAN = Command(
    "plan", "what a run file comes to, and all that is wrong with it; starts nothing", _plan, _add_plan,
    "Placement, memory of each device, batch, staleness: without a GPU, without starting anything. "
    "Exit status 2 if the run could not start.",
)  # fmt: skip
SCHEMA = Command("schema", "print the JSON Schema of the run file, for editors", _schema, lambda parser: None)
DOCTOR = Command(
    "doctor", "what of this machine will bite", _doctor, _add_doctor,
    "Driver, packages, memory, limits, disk, rights, variables; each with what to do. Exit "
    "status 1 if something must be mended.",
)  # fmt: skip
CONVERT = Command(
    "convert", "write a checkpoint as a HuggingFace folder", _convert, _add_convert,
    "Write the weights of a checkpoint, of either trainer and any layout, as a HuggingFace folder. Needs no GPU and no "
    "megatron-core. (Trainers load HuggingFace folders by themselves.)",
)  # fmt: skip
