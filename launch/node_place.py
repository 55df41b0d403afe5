"""Which node this is, of how many, and where node 0 is met: from flags, or from what the scheduler says. Pure.

Flags win over torchrun's variables (PET_*), these over Slurm's. `hostlist` was considered for Slurm's list of nodes:
only its first name is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError, raised_as
from ..transport.address import LOOPBACK, PORT_REMEDY, Endpoint, in_url

DEFAULT_PORT = 29400

_NUM_NODES = ("PET_NNODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
"""Each task of a step of Slurm's is a launcher, whatever machine it is on."""
_NODE_RANK = ("PET_NODE_RANK", "SLURM_PROCID", "SLURM_NODEID")
_SIZES = {
    "WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID"
}  # fmt: skip
_ENDPOINT, _ADDRESS, _PORT = "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "PET_MASTER_PORT"
_HOST_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True, slots=True)
class NodePlace:
    """This node among the nodes of the run."""

    rank: int
    num_nodes: int
    endpoint: Endpoint | None
    max_nodes: int = 0
    """So many may take part at the same time, those included that come later; 0: as many as come."""
    file: Path | None = None
    """Where node 0 writes its address, and the others read it that have no endpoint."""
    job_key: Path | None = None
    is_late: bool = False
    """It joins a live run, which gives it its rank."""

    @property
    def is_alone(self) -> bool:
        """Whether no other node can ever join: then no port is opened."""
        return self.num_nodes == 1 and self.max_nodes <= 1


ALONE = NodePlace(0, 1, Endpoint(LOOPBACK, 0))
"""Of a run on one machine."""


def parse_endpoint(text: str, *, where: str) -> Endpoint:
    """ConfigError naming `where` for what is no endpoint."""
    with raised_as(ConfigError, where, ValueError, remedy=PORT_REMEDY):
        return Endpoint.parse(text, DEFAULT_PORT)


def parse_num_nodes(text: str) -> tuple[int, int]:
    """Torchrun's notation: "4" -> (4, 0); "2:4" -> (2, 4): two are waited for, two more may come. ValueError."""
    first, sign, last = text.partition(":")
    if not first.isdecimal() or (sign and not last.isdecimal()):
        raise ValueError(f"{text!r} is neither a number of nodes nor MIN:MAX")
    if sign and int(last) < int(first):
        raise ValueError(f"{text!r}: fewer at most than at least")
    return int(first), int(last) if sign else 0


def find_place(
    num_nodes: int | tuple[int, int] | None,
    rank: int | None,
    endpoint: str | None,
    env: Mapping[str, str],
    *,
    has_file: bool = False,
) -> NodePlace:
    """This node's place. ConfigError naming what is missing or impossible and where it could come from.

    `num_nodes`: those that are waited for, or these and at most how many. `has_file`: a file will say where node 0 is
    met, if no flag does.
    """
    nodes, most = _num_nodes(num_nodes, env)
    if nodes < 1:
        raise ConfigError(f"--nnodes is {nodes}", remedy="a run has at least one node")
    said_by, place = "--node-rank", rank
    if place is None:
        said_by, place = _number(_NODE_RANK, env, 0 if nodes == 1 else None, "--node-rank")
    if not 0 <= place < nodes:
        raise ConfigError(f"{said_by} {place} is not among {nodes} nodes", remedy=f"ranks are 0 to {nodes - 1}")
    if endpoint:
        met = parse_endpoint(endpoint, where="--rdzv")
    else:
        at_home = Endpoint(LOOPBACK, 0) if place == 0 and _is_on_one_host(env) else None
        met = at_home if has_file else _scheduled_endpoint(env, max(nodes, most))
    if met is not None and met.port == 0 and place != 0:
        raise ConfigError("--rdzv has port 0", remedy="only node 0 may choose a free port; give its port to the others")
    return NodePlace(place, nodes, met, most)


def _num_nodes(flag: int | tuple[int, int] | None, env: Mapping[str, str]) -> tuple[int, int]:
    if flag is not None:
        return flag if isinstance(flag, tuple) else (flag, 0)
    name = next((name for name in _NUM_NODES if env.get(name)), "")
    if not name:
        check_is_one(env, remedy="give --nnodes and --node-rank, or unset it")
        return 1, 0
    with raised_as(ConfigError, f"{name}={env[name]!r}", ValueError, remedy="give --nnodes"):
        return parse_num_nodes(env[name])


def check_is_one(env: Mapping[str, str], remedy: str) -> None:
    """Processes of torchrun, mpirun or srun, or pods, that each would start a whole run. Raises ConfigError."""
    for name, rank_name in _SIZES.items():
        if env.get(name, "") not in ("", "1", "0"):
            rank, size = env.get(rank_name, "unknown"), env[name]
            cause = f"{name}={size} and {rank_name}={rank} are set: {size} processes would start a whole run each"
            raise ConfigError(cause, remedy=remedy)


def _number(names: tuple[str, ...], env: Mapping[str, str], default: int | None, flag: str) -> tuple[str, int]:
    """The variable, and its number."""
    for name in names:
        text = env.get(name, "")
        if text:
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is not a number", remedy=f"give {flag}")
            return name, int(text)
    if default is None:
        raise ConfigError(f"{flag} is not given", remedy=f"neither is {', '.join(names)} in the environment")
    return flag, default


def _scheduled_endpoint(env: Mapping[str, str], num_nodes: int) -> Endpoint:
    if endpoint := env.get(_ENDPOINT):
        return parse_endpoint(endpoint, where=_ENDPOINT)
    _, port = _number((_PORT,), env, DEFAULT_PORT, "--rdzv")
    if host := env.get(_ADDRESS, "").strip():
        return parse_endpoint(f"{in_url(host.strip('[]'))}:{port}", where=_ADDRESS)
    for name in _HOST_LIST:
        if env.get(name):
            return Endpoint(LOOPBACK if _is_on_one_host(env) else first_host(env[name]), port)
    if num_nodes == 1:
        return Endpoint(LOOPBACK, 0)
    raise ConfigError("--rdzv is not given", remedy="say where node 0 is met, e.g. --rdzv node0:29400")


def _is_on_one_host(env: Mapping[str, str]) -> bool:
    """Whether Slurm put all tasks of the step on one machine, whose name may mean its loopback address."""
    return env.get("SLURM_STEP_NUM_NODES") == "1" and not (env.get(_ENDPOINT) or env.get(_ADDRESS))


def first_host(host_list: str) -> str:
    """First name of Slurm's notation: `gpu[07-12,15],x1` -> `gpu07`; ConfigError if it is not that notation."""
    match = re.match(r"([^\s,\[\]]+(\[\d[\d,-]*\])?)+", host_list.strip())
    if match is None:
        raise ConfigError(f"{host_list!r} is no list of hosts", remedy="give --rdzv")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
