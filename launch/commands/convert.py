"""`myxa convert`: a checkpoint of a run as a HuggingFace folder."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .output import Verbs, add_json_flag, show

RUN_FILE = "config.toml"


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    verb = verbs.add_parser(
        "convert",
        help="write a checkpoint as a HuggingFace folder",
        description="Write the weights of a checkpoint, of either trainer and any layout, as a HuggingFace folder. "
        "Needs no GPU and no megatron-core. (Trainers load HuggingFace folders by themselves.)",
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's: the newest is taken")
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes; empty, or not there yet")
    verb.add_argument("--model", type=Path, default=None, metavar="DIR",
                      help="folder that the run started from (model.path of the run's own config.toml)")  # fmt: skip
    verb.add_argument("--dtype", default="", choices=("", "float32", "bfloat16", "float16"), metavar="TYPE",
                      help="float32, bfloat16 or float16 (as in the checkpoint)")  # fmt: skip
    add_json_flag(verb)
    verb.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from ...actors.backends.convert import convert  # torch is needed here only
    from ..lives.named_checkpoint import named_checkpoint

    model = options.model or _model_of_run(options.checkpoint)
    done = convert(named_checkpoint(options.checkpoint, reads_all=True), model, options.folder, dtype=options.dtype)
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(done).items()}
    show(options, facts, _sentence)
    return 0


def _sentence(done: dict[str, Any]) -> str:
    return (
        f"{done['folder']}: {done['num_tensors']} weights, {done['num_parameters']:,} values of {done['dtype']}, "
        f"from {done['checkpoint']} ({done['backend']}, {done['num_updates']} updates)"
    )


def _model_of_run(checkpoint: Path) -> Path:
    """`model.path` of the run that the checkpoint lies in."""
    from ...core.config import load_config

    for place in (checkpoint, *checkpoint.absolute().parents[:2]):
        if (place / RUN_FILE).is_file():
            return Path(load_config([place / RUN_FILE], []).model.path)
    raise ConfigError(
        f"{checkpoint} does not lie in a run directory, so nothing says which model it is of",
        remedy="name the folder that the run started from with --model",
    )
