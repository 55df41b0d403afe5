"""Commands that need no run: `plan`, `schema`, `doctor`, `convert`, `engine`, `migrate`, and `render` (a job file)."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ..run_dir import CONFIG
from ..waiting import Waiting
from .parser import FILE_WORDS, JSON, SET, at_least, command, flag, positive, show
from .processes import exports

if TYPE_CHECKING:
    from rich.text import Text

    from ...core.config import RunConfig


@command(
    "plan", "what a run file comes to, and all that is wrong with it; starts nothing",
    flag("file", nargs="+", **FILE_WORDS), SET,
    flag("--nnodes", type=at_least(1), default=1, metavar="N", help="number of machines (%(default)s)"),
    flag("--device-gib", type=positive("GiB"), default=0.0, metavar="GIB",
         help="memory of one GPU (what NVML says, where there is one)"),
    flag("--elsewhere", action="store_true", help="the run will be started on another machine: do not look at this "
         "one's packages, interpreters, devices, ports and disk"), JSON,
    description="Placement, memory of each device, batch, staleness: without a GPU, without starting anything. Exit "
    "status 2 if the run could not start.",
)  # fmt: skip
def plan(options: argparse.Namespace) -> int:
    with Waiting("looking at the run file and what it names"):
        from ..checks.plan import make_plan, plan_json, plan_text

        planned = make_plan(
            options.file, options.overrides, num_nodes=options.nnodes, device_gib=options.device_gib,
            is_here=not options.elsewhere,
        )  # fmt: skip

    show(options, plan_json(planned), lambda _: _coloured(plan_text(planned)))
    return 2 if planned.errors else 0


STYLES = ((r"== .*errors?$|.* OVER$|FAIL ", "bold red"), (r"== .*warnings?$|warn ", "yellow"), ("== ", "bold"))
"""Of lines that begin like that, at a terminal."""


def _coloured(text: str) -> Text | str:
    if not sys.stdout.isatty():
        return text
    from rich.text import Text

    lines = text.splitlines()
    styles = (next((style for like, style in STYLES if re.match(like, line)), "") for line in lines)
    return Text("\n").join(Text(line, style=style) for line, style in zip(lines, styles, strict=True))


@command("schema", "print the JSON Schema of the run file, for editors")
def schema(_: argparse.Namespace) -> int:
    from ...core.config.loading import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


@command(
    "doctor", "what of this machine hinders a run, and what to do about it",
    flag("--dir", default="runs", metavar="DIR", help="where run directories will be made (%(default)s)"), JSON,
    description="Driver, packages, memory, limits, disk, rights, variables; each with what to do. Exit status 1 if "
    "something must be mended.",
)  # fmt: skip
def doctor(options: argparse.Namespace) -> int:
    from ..checks.all_checks import findings_json, findings_text, judge
    from ..checks.machine import gather

    findings = judge(gather(options.dir))
    show(options, findings_json(findings), lambda _: _coloured(findings_text(findings)))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


@command(
    "convert", "write a checkpoint as a HuggingFace folder",
    flag("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's: the newest; of other programs "
         "iter_..., torch_dist; with --dtype fp8 a model folder"),
    flag("folder", type=Path, metavar="FOLDER", help="where the model goes; empty, or not there yet"),
    flag("--model", type=Path, default=None, metavar="DIR",
         help="folder that the run started from (model.path of the run's own config.toml)"),
    flag("--dtype", default="", choices=("", "float32", "bfloat16", "fp8"), metavar="TYPE", help="float32 or bfloat16 "
         "(as in the checkpoint); fp8: of a model folder, in blocks of 128 x 128, for servers"),
    flag("--adapter", action="store_true", help="of a run with [lora]: an adapter folder for PEFT, not the model with "
         "the adapters merged"), JSON,
    description="Write the weights of a checkpoint, of either trainer and any layout, as a HuggingFace folder. Needs "
    "no GPU and no megatron-core. (Trainers load HuggingFace folders by themselves.)",
)  # fmt: skip
def convert(options: argparse.Namespace) -> int:
    from ...actors.backends import convert as conversion  # torch is needed here only
    from ..run_lineage.resume_point import named_checkpoint

    if options.dtype == "fp8" and options.adapter:
        raise ConfigError("--adapter does not go with --dtype fp8", remedy="leave one of them out")
    place: Path = options.checkpoint
    if options.dtype == "fp8":
        done = conversion.quantise_folder(place, options.folder)
    else:
        model = options.model or _model_of_run(place)
        checkpoint = conversion.foreign_checkpoint(place) or named_checkpoint(place, reads_all=True)
        done = conversion.convert(checkpoint, model, options.folder, dtype=options.dtype, adapter=options.adapter)
    show(options, done, _convert_sentence)
    return 0


def _convert_sentence(done: dict[str, Any]) -> str:
    text = f"{done['folder']}: {done['num_tensors']} weights, {done['num_parameters']:,} values of {done['dtype']}"
    if "backend" in done:
        text += f", from {done['checkpoint']} ({done['backend']}, {done['num_updates']} updates)"
    return text


def _model_of_run(checkpoint: Path) -> Path:
    from ...actors.hub import cached
    from ...core.config import load_config

    for place in (checkpoint, *checkpoint.absolute().parents[:2]):
        if (place / CONFIG).is_file():
            return Path(cached(load_config(place / CONFIG)).model.path)
    if not checkpoint.exists():
        raise ConfigError(
            f"{checkpoint} does not exist", remedy="name a run, one of its checkpoints, or a model folder"
        )
    raise ConfigError(
        f"{checkpoint} does not lie in a run directory, so nothing says which model it is of",
        remedy="name the folder that the run started from with --model",
    )


@command(
    "engine", "serve a model folder to any OpenAI or Anthropic client, without a run",
    flag("action", choices=("serve",), help="answer requests until Ctrl-C"),
    flag("folder", type=Path, metavar="FOLDER", help="HuggingFace folder of a model"),
    flag("--host", default="127.0.0.1", help="address to listen on (%(default)s)"),
    flag("--port", type=at_least(0, 65535), default=0, metavar="PORT", help="its port (any free one)"),
    flag("--max-running", type=at_least(1), default=64, metavar="N", help="answers at a time"),
    flag("--threads", type=at_least(1), default=1, metavar="N", help="threads for torch (%(default)s)"), JSON,
    description="Serves a folder by the engine that runs on the CPU, as a run's gateway does for its eval key. Prints "
    "exports for a shell, with the key. (On GPUs use SGLang's own server: python -m sglang.launch_server --model-path "
    "FOLDER.)",
)  # fmt: skip
def engine(options: argparse.Namespace) -> int:
    import asyncio

    from ..composition.rollout_parts import serve_model  # torch is needed here only

    address = {"host": options.host, "port": options.port}
    tell, num, threads = partial(show, options, render=exports), options.max_running, options.threads
    asyncio.run(serve_model(options.folder, tell, num=num, threads=threads, **address))
    return 0


@command(
    "migrate", "turn arguments of slime or verl into a run file",
    flag("peer", choices=("slime", "verl"), help="the program that the file is for"),
    flag("file", type=Path, nargs="?", metavar="FILE", help="a script or list with its arguments, or a Hydra config "
         "(.yaml); left out: print the table of names"),
    description="Print a run file with what has a counterpart, and lists of what has none or needs your hand. The file "
    "is read, never run. (myxa migrate slime run.sh > run.toml)",
)  # fmt: skip
def migrate(options: argparse.Namespace) -> int:
    from ...core.config.peers import lines_of
    from ..migration import run_file

    text = "\n".join([*lines_of(options.peer), ""])
    print(text if options.file is None else run_file.migrate(options.peer, options.file).text(), end="")
    return 0


FILES = {"slurm": "slurm.sh", "k8s": "k8s.yaml", "compose": "compose.yaml"}
"""In `launch/templates/`."""


@command(
    "render", "the job file of a run for Slurm, Kubernetes or Docker Compose",
    flag("kind", choices=tuple(FILES), help="who starts the launchers"),
    flag("file", metavar="RUN.TOML", help="run file"), SET,
    flag("--time", default="12:00:00", metavar="LIMIT", help="slurm: time limit (%(default)s)"),
    flag("--image", default="myxa", help="k8s, compose: the image with myxa in it (%(default)s)"),
    flag("--volume", default="work", metavar="CLAIM", help="k8s: the shared volume claim (%(default)s)"),
    flag("--folder", default="/work", help="k8s, compose: where it is mounted (%(default)s)"),
    description="Print a batch script, manifests or a compose file that start a launcher on each node that the run "
    "file names, with the GPUs that its roles name.",
)  # fmt: skip
def render(options: argparse.Namespace) -> int:
    from ...core.config import load_config

    config = load_config([Path(options.file)], options.overrides)
    print(job_file(options.kind, config, options), end="")
    return 0


def num_nodes(config: RunConfig) -> int:
    from ..supervisor.placement import started_roles

    roles = [started.settings for started in started_roles(config)]
    return max((node for role in roles if role.nodes != "*" for node in role.nodes), default=0) + 1


def job_file(kind: str, config: RunConfig, options: argparse.Namespace) -> str:
    """Raises ConfigError for a run name that the scheduler cannot take."""
    from ..supervisor.placement import place

    nodes = num_nodes(config)
    devices = [device for actor in place(config, nodes) for device in (*actor.visible_devices, *actor.devices)]
    gpus = max(devices, default=-1) + 1
    name = config.run.name.lower().replace("_", "-")
    if kind != "slurm" and re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name) is None:
        raise ConfigError(
            f"run.name = {config.run.name!r} is no name of a {kind} object",
            remedy="use a letter first, then letters, digits and hyphens, 52 at most",
        )
    sets = [word for item in options.overrides for word in ("--set", item)]
    arguments = shlex.join([options.file, *sets])
    if kind != "slurm":
        arguments = arguments.replace("$", "$$")  # one alone begins a variable there
    values = {
        "name": name, "nodes": nodes, "gpus": gpus, "time": options.time, "image": options.image,
        "volume": options.volume, "folder": options.folder, "launch": arguments,
        "run": config.run.name,
        "runs": "runs" if Path(config.run.dir) == Path.cwd() / "runs" else shlex.quote(config.run.dir),
        "gres": f"#SBATCH --gres=gpu:{gpus}\n" if gpus else "",
        "limits": f"{{nvidia.com/gpu: {gpus}}}" if gpus else "{}",
        "devices": f"[{{driver: nvidia, count: {gpus}, capabilities: [gpu]}}]" if gpus else "[]",
    }  # fmt: skip
    node = _template("compose_node.yaml")
    services = "".join(node.substitute(values, rank=rank) for rank in range(nodes))
    return _template(FILES[kind]).substitute(values, services=services)


def _template(name: str) -> Template:
    return Template((files("myxa.launch") / "templates" / name).read_text())
