"""`myxa render slurm|k8s|compose`: the job file of a run, for those who start it."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from .parser import Command, Parser

if TYPE_CHECKING:
    from ...core.config import RunConfig

FILES = {"slurm": "slurm.sh", "k8s": "k8s.yaml", "compose": "compose.yaml"}
"""In `launch/templates/`."""


def _add(parser: Parser) -> None:
    parser.add_argument("kind", choices=tuple(FILES), help="who starts the launchers")
    parser.add_argument("file", metavar="RUN.TOML", help="run file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="overrule a value of the file, in the job too; may be repeated")  # fmt: skip
    parser.add_argument("--time", default="12:00:00", metavar="LIMIT", help="slurm: time limit (%(default)s)")
    parser.add_argument("--image", default="myxa", help="k8s, compose: the image with myxa in it (%(default)s)")
    parser.add_argument("--volume", default="work", metavar="CLAIM", help="k8s: the shared volume claim (%(default)s)")
    parser.add_argument("--folder", default="/work", help="k8s, compose: where it is mounted (%(default)s)")


def _render(options: argparse.Namespace) -> int:
    from ...core.config import load_config

    config = load_config([Path(options.file)], options.overrides)
    print(job_file(options.kind, config, options), end="")
    return 0


def num_nodes(config: RunConfig) -> int:
    """The fewest that the roles' `nodes` name."""
    from ..supervisor.placement import started_roles

    roles = [config.roles[role] for role in started_roles(config)]
    named = [node for role in roles if role.nodes != "*" for node in role.nodes]
    return max(named, default=0) + 1


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
    values = {
        "name": name, "nodes": nodes, "gpus": gpus, "time": options.time, "image": options.image,
        "volume": options.volume, "folder": options.folder, "launch": shlex.join([options.file, *sets]),
        "gres": f"#SBATCH --gres=gpu:{gpus}\n" if gpus else "",
        "limits": f"{{nvidia.com/gpu: {gpus}}}" if gpus else "{}",
        "devices": f"[{{driver: nvidia, count: {gpus}, capabilities: [gpu]}}]" if gpus else "[]",
    }  # fmt: skip
    node = _template("compose_node.yaml")
    services = "".join(node.substitute(values, rank=rank) for rank in range(nodes))
    return _template(FILES[kind]).substitute(values, services=services)


def _template(name: str) -> Template:
    return Template((files("myxa.launch") / "templates" / name).read_text())


RENDER = Command(
    "render", "the job file of a run for Slurm, Kubernetes or Docker Compose", _render, _add,
    "Print a batch script, manifests or a compose file that start a launcher on each node that the run file names, "
    "with the GPUs that its roles name.",
)  # fmt: skip
