"""How a node's part of a run is launched, how it ended, and what a node says of itself. Plain records."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ... import __version__
from ...core.config import RunConfig
from ...core.errors import ConfigError, TrainError
from ...core.process import boot_id
from ..actor_spec import ActorSpec
from ..composition.weight_channels import choose_channel
from ..contracts import LateWish, NodeFacts
from ..lives.named_checkpoint import named_checkpoint
from ..node_place import NodePlace
from ..preflight.preflight import check_node
from ..run_dir import RunDir
from ..supervisor.patience import Patience
from ..supervisor.placement import place as place_actors
from ..worker_spec import DEFAULT_PROGRAM
from .agent import AgentOptions
from .meeting import Meeting
from .preloads import preloads_of

NCCL_WITHIN_HOST = {"NCCL_SOCKET_IFNAME": "lo"}
"""NCCL's processes meet over sockets; it takes the host's own address otherwise. gloo: actors/torch_store.py."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to launch; what to launch is the run's configuration."""

    place: NodePlace
    rdzv_file: Path | None = None
    job_key: Path | None = None
    program: str = DEFAULT_PROGRAM
    is_quiet: bool = False
    patience: Patience = field(default_factory=Patience)
    run_dir: RunDir | None = None
    """A directory that is there already, and held by whoever names it; None: a new one is made."""
    start: Path | None = None
    """Checkpoint that node 0 chose to go on from; None: what `trainer.resume` names."""
    prepare: Callable[[], object] | None = None
    """What is left to do there once this node is known to be able to take part."""
    next_steps: tuple[str, ...] = ()
    """What to suggest at a good end."""
    late: LateWish | None = None
    """Set on a node that comes to a run that goes on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended, as this node's launcher saw it."""

    exit_code: int
    reason: str
    run_dir: Path | None = None
    version: int = -1
    """Of the weights at the end; -1: not known."""


def check_own(config: RunConfig, actors: Sequence[ActorSpec], options: LaunchOptions, node: int) -> None:
    """Whether this node has what its actors need. Somebody's own composition root may need none of what ours needs.
    Raises what `check_node` raises."""
    if options.program == DEFAULT_PROGRAM:
        check_node(config, [actor for actor in actors if actor.node == node])
    else:
        _check_program(options.program)


def _check_program(program: str) -> None:
    module = program.partition(":")[0]
    try:
        is_there = module.endswith(".py") or find_spec(module.partition(".")[0]) is not None
    except ValueError:
        is_there = False
    if not is_there:
        raise ConfigError(f"--program: there is no module {module!r}", remedy="install it, or put it on PYTHONPATH")


def with_start(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """With the checkpoint that `trainer.resume` means now, for node 0: the run that it names may live and write newer
    ones, and everybody has to begin from the same, whenever it looks. Quick, for the other nodes wait meanwhile. Raises
    ConfigError if it means none."""
    if options.start is None and not config.trainer.resume:
        return config
    try:
        start = options.start or named_checkpoint(config.trainer.resume).absolute()
    except TrainError as error:
        if options.program != DEFAULT_PROGRAM:  # it may mean something else by it
            return config
        raise ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy) from error
    trainer = config.trainer.model_copy(update={"resume": str(start)})
    return config.model_copy(update={"trainer": trainer})


def facts_of(place: NodePlace, text: str, late: LateWish | None = None) -> NodeFacts:
    """How this node introduces itself."""
    return NodeFacts(
        node=place.rank,
        num_nodes=place.num_nodes,
        version=__version__,
        config=text,
        host=socket.gethostname(),
        machine=boot_id(),
        late=late,
        nonce=secrets.token_hex(8),
    )


def agent_options(
    options: LaunchOptions, place: NodePlace, meeting: Meeting, runtime_dir: Path, config: RunConfig
) -> AgentOptions:
    """What this node's agent works with."""
    actors = place_actors(config, place.num_nodes) if options.late is None else ()  # a late node's come with the orders
    return AgentOptions(
        node=place.rank,
        address=meeting.address,
        runtime_dir=runtime_dir,
        rdzv_path=str(meeting.rdzv_path),
        lost_s=options.patience.lost_s,
        program=options.program,
        key_for=None if place.is_alone else meeting.key_for,
        must_share=options.late is not None and choose_channel(config) == "disk",
        preloads=preloads_of(config, options.program, [each for each in actors if each.node == place.rank], os.environ),
        base_env=NCCL_WITHIN_HOST if place.is_alone and not config.engine.attach else {},
    )
