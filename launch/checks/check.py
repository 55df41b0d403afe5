"""A check looks at one thing and yields findings. `all_checks.CHECKS` lists every check, each once.

`myxa plan` prints the findings of a run file, `preflight` raises the errors among them, `myxa doctor` prints those of
the machine. A check starts no process of a run and raises nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from ...actors.models.hf_folder import read_config
from ...actors.models.model_config import ModelConfig
from ...core.config import RunConfig
from ...core.config.loading import Finding
from ...core.config.root import model_key
from ...core.config.section import walk
from ...core.errors import ConfigError, MyxaError
from ..actor_spec import ActorSpec

P = ParamSpec("P")
T = TypeVar("T")

Needs = Literal["run file", "estimate", "named files", "node", "machine"]
"""What a check looks at: the run file and the model's config.json; the same, with figures that are estimated; the files
that the run file names; the node where the actors will run; the machine, without any run file."""


def warnings(*rows: tuple[object, str, str, str]) -> Iterator[Finding]:
    """A warning for each row that holds: whether it does, the key, what it means (after the key), what to do."""
    for holds, key, text, remedy in rows:
        if holds:
            yield Finding(key, ConfigError(f"{key} {text}", remedy=remedy), "warning")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may be wrong."""

    needs: Needs
    look: Callable[[Any], Iterable[Finding]]
    """Takes a `CheckedRun`; of the machine its `MachineFacts`."""
    of_models: bool = False
    """It looks at each model of the run's own too, as if that were the policy."""


class CheckedRun:
    """A run and those of its actors that are checked, with the answers that several checks share."""

    def __init__(
        self,
        config: RunConfig,
        actors: Iterable[ActorSpec],
        *,
        is_here: bool = True,
        device_bytes: int | None = None,
        wait_s: float = 0.0,
        known: Mapping[Callable[..., object], object] | None = None,
    ) -> None:
        """`known`: answers that need not be asked for."""
        self.config = config
        actors = tuple(actors)
        self.actors = tuple(actor for actor in actors if actor.role != "model")
        self.is_here = is_here
        """Whether the run will start on this machine."""
        self.device_bytes = device_bytes
        """Of a GPU; None: ask the machine."""
        self.wait_s = wait_s
        """How long a server of `engine.attach` may take to appear."""
        self._known = dict(known or {})
        theirs = [replace(actor, role="rollout") for actor in actors if actor.role == "model"]
        self.of_models = {
            name: CheckedRun(
                config.of_model(name), mine, is_here=is_here, device_bytes=device_bytes, wait_s=wait_s, known=known
            )
            for name in config.models
            if (mine := [actor for actor in theirs if actor.model == name])
        }
        """Runs whose policy is that model; of those that have actors here."""

    def once(self, ask: Callable[[CheckedRun], T]) -> T:
        """What `ask` answers about this run; asked once."""
        if ask not in self._known:
            self._known[ask] = ask(self)
        return cast("T", self._known[ask])

    def of(self, *roles: str) -> tuple[ActorSpec, ...]:
        return tuple(actor for actor in self.actors if actor.role in roles)

    @property
    def model(self) -> ModelConfig | None:
        """The model's config; None: it cannot be read, which is a finding of its own."""
        return self.once(model_of)


def model_of(run: CheckedRun) -> ModelConfig | None:
    try:
        model = read_config(run.config.model.path, has_mtp=run.config.megatron.mtp > 0)
        return model.as_scorer() if run.config.algo.kind == "reward" else model
    except MyxaError:
        return None


def looked(key: str, look: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
    """What `look` raises, as a finding about the key that its message begins with, else about `key`."""
    try:
        look(*args, **kwargs)
    except MyxaError as error:
        yield Finding(key_of(error.message) or key, error)


KEY = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_]+)+")


def key_of(message: str) -> str:
    """The key of the run file that a message begins with, also one of a free table; or nothing."""
    match = KEY.match(message)
    if match is None:
        return ""
    parts = match[0].split(".")
    prefixes = (".".join(parts[:length]) for length in range(2, len(parts) + 1))
    return match[0] if any(prefix in _known_keys() for prefix in prefixes) else ""


@cache
def _known_keys() -> frozenset[str]:
    return frozenset(".".join(path) for path, _ in walk(RunConfig))


def run_checks(checks: Sequence[Check], subject: object, *needs: Needs) -> Iterator[Finding]:
    for check in checks:
        if check.needs not in needs:
            continue
        yield from check.look(subject)
        for name, view in subject.of_models.items() if check.of_models and isinstance(subject, CheckedRun) else ():
            for finding in check.look(view):
                error = finding.error
                message, remedy = (model_key(name, text) for text in (error.message, error.remedy))
                yield Finding(model_key(name, finding.key), type(error)(message, remedy=remedy), finding.severity)
