"""How a node's part of a run is launched, what it needs before, and how the node introduces itself."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ... import __version__
from ...actors.hub import fetched
from ...core.config import RunConfig
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import ConfigError, TrainError
from ...core.process import adopts_orphans, boot_id
from ...core.timeouts import TIMEOUTS, LauncherTimeouts
from ..actor_spec import ActorSpec
from ..contracts import NodeFacts
from ..host import look_at_gpus
from ..node_place import ALONE, NodePlace
from ..run_dir import RunDir
from ..run_lineage.resume_point import named_checkpoint
from ..waiting import Waiting
from ..worker_spec import DEFAULT_PROGRAM
from .fork_server import ForkServer, preloaded
from .rendezvous import NodeRendezvous


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to launch; what to launch is the run's configuration."""

    place: NodePlace = ALONE
    rdzv_file: Path | None = None
    job_key: Path | None = None
    program: str = DEFAULT_PROGRAM
    is_quiet: bool = False
    timeouts: LauncherTimeouts = TIMEOUTS.launcher
    run_dir: RunDir | None = None
    """An existing directory, held by the caller, whose configuration names the checkpoint; None: a new one is made."""
    prepare: Callable[[], object] | None = None
    """Prepares the directory once it is clear that this node can take part."""
    is_late: bool = False
    """This node joins a live run."""


def check_own(config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int) -> tuple[str, ...]:
    """Whether this node has what its actors need, by our own composition root. Raises and returns as `check_node`."""
    if program == DEFAULT_PROGRAM:
        from ..checks.all_checks import check_node  # while a fork server does its imports

        return check_node(config, actors, node)
    module = program.partition(":")[0]
    with suppress(ValueError):
        if module.endswith(".py") or find_spec(module.partition(".")[0]) is not None:
            return ()
    raise ConfigError(f"--program: there is no module {module!r}", remedy="install it, or put it on PYTHONPATH")


async def made_ready(
    config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int, waiting: Waiting
) -> RunConfig:
    """The configuration once this node has what its actors need: of the hub, and by the checks. Raises MyxaError."""
    has_data = node == 0 or any(actor.role == "buffer" and actor.node == node for actor in actors)
    fetch = partial(fetched, config, has_data=has_data, say=waiting.say, doing=waiting.now)
    config = await in_daemon_thread(fetch, "hub")
    waiting.now("checking what its actors need")
    for text in await in_daemon_thread(partial(check_own, config, actors, program, node), "checks"):
        waiting.say(f"warning: {text}")
    return config


def fork_server_of(
    config: RunConfig, actors: Sequence[ActorSpec], program: str, node: int, folder: Path
) -> ForkServer | None:
    """Of a node, which begins with its imports on that order; None: no actor is forked. `folder`: for its log."""
    modules = preloaded(config, program, [actor for actor in actors if actor.node == node], os.environ)
    if not modules or not adopts_orphans():  # in a program that hosts us a forked process would not become our child
        return None
    return ForkServer(modules, folder, logging.getLogger("myxa.launcher"))


def with_start(config: RunConfig, options: LaunchOptions) -> RunConfig:
    """For node 0: resolve `trainer.resume` to a checkpoint, for the run that it names may write newer ones, and all
    actors have to begin from the same. Raises ConfigError if there is none."""
    if options.run_dir is not None or not config.trainer.resume:
        return config
    try:
        start = named_checkpoint(config.trainer.resume).absolute()
    except TrainError as error:
        if options.program != DEFAULT_PROGRAM:  # it may interpret the key otherwise
            return config
        raise ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy) from error
    trainer = config.trainer.model_copy(update={"resume": str(start)})
    return config.model_copy(update={"trainer": trainer})


def facts_of(options: LaunchOptions, rendezvous: NodeRendezvous, actors: Sequence[ActorSpec] = ()) -> NodeFacts:
    """`actors`: none where they are not known yet."""
    node = options.place.rank
    return NodeFacts(
        node=node, version=__version__, host=socket.gethostname(), address=rendezvous.address, machine=boot_id(),
        is_late=options.is_late, nonce=secrets.token_hex(8), gpus=seen_gpus(actors, node),
    )  # fmt: skip


def seen_gpus(actors: Sequence[ActorSpec], node: int) -> tuple[str, ...]:
    """UUIDs of the GPUs that actors of this node see. Asks the driver."""
    numbers = {number for actor in actors if actor.node == node for number in actor.visible_devices}
    gpus = look_at_gpus().found if numbers else ()
    return tuple(gpus[number].uuid for number in sorted(numbers) if number < len(gpus))
