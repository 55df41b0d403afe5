"""Which attached servers belong to which rollout actor: those of the run file are dealt out, later ones named. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.config import RunConfig
from ...core.config.section import HTTP_URL
from ...core.errors import ConfigError
from ..actor_spec import ActorSpec


def servers_of(actor: ActorSpec, config: RunConfig) -> tuple[str, ...]:
    """Addresses of the servers that this actor stands in front of; empty: it launches its own."""
    urls = config.engine.attach
    if actor.attach or not urls:
        return actor.attach
    return urls[actor.index % len(urls) :: num_at_start(config)]


def num_at_start(config: RunConfig) -> int:
    """Rollout actors among which the servers of the run file are dealt out."""
    return max(config.roles.rollout.count * len(config.roles.rollout.nodes), 1)


def deal_out(config: RunConfig, text: str, num_actors: int, there: Iterable[ActorSpec]) -> list[tuple[str, ...]]:
    """The addresses "URL,URL,..." for so many new actors, one each at least; nothing: those of the first ones that have
    left are free. `there`: who has servers now. Raises ConfigError with the reason if that cannot be."""
    there = tuple(there)
    urls = tuple(part.strip() for part in text.split(",") if part.strip())
    is_attached = config.roles.rollout.kind == "sglang" and bool(config.engine.attach)
    if not urls:
        if not is_attached or (len(there) + num_actors <= num_at_start(config) and not any(a.attach for a in there)):
            return [()] * num_actors
        num = len(config.engine.attach)
        raise ConfigError(
            f"the {num} servers of engine.attach were divided among the rollout actors at the start",
            remedy="name servers for the new ones: myxa scale rollout=N --attach http://host:port,...",
        )
    if not is_attached:
        raise ConfigError("this run has no attached servers", remedy="leave --attach out: new actors have their own")
    _check(urls, config, there)
    if len(urls) < num_actors:
        raise ConfigError(
            f"{len(urls)} servers are too few for {num_actors} more rollout actors", remedy="name one for each at least"
        )
    return [urls[number::num_actors] for number in range(num_actors)]


def _check(urls: Sequence[str], config: RunConfig, there: Iterable[ActorSpec]) -> None:
    wrong = next((url for url in urls if not HTTP_URL.fullmatch(url)), "")
    if wrong:
        raise ConfigError(f'--attach: "{wrong}" is no address of a server', remedy="write http://host:port")
    in_use = {_bare(url): actor.name for actor in there for url in servers_of(actor, config)}
    taken = next((url for url in urls if _bare(url) in in_use), "")
    if taken:
        owner = in_use[_bare(taken)]
        raise ConfigError(f"{taken} serves {owner} already", remedy=f"drain {owner} first, or name another server")
    if len({_bare(url) for url in urls}) != len(urls):
        raise ConfigError("--attach names a server twice", remedy="name each once")


def _bare(url: str) -> str:
    return url.rstrip("/")
