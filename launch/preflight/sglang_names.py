"""Whether launched servers have an interpreter with SGLang, and know the arguments of `[sglang]`.

The names are read from the source text of SGLang's ServerArgs: nothing of it is imported. The rollout actor asks the
class itself before it starts a server.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ...core.config import RunConfig
from ...core.errors import ConfigError, MyxaError
from ...core.suggestion import suggest
from ..actor_spec import ActorSpec
from .finding import ConfigFinding
from .interpreters import Answer, folder_of_sglang

SOURCE = Path("srt/server_args.py")
CLASS = "ServerArgs"


def sglang_findings(
    config: RunConfig, actors: Sequence[ActorSpec], answers: Mapping[str, Answer]
) -> Iterator[ConfigFinding]:
    """What is wrong for servers that the rollout actors among these will launch."""
    actor = next((actor for actor in actors if actor.role == "rollout" and actor.kind == "sglang"), None)
    if actor is None or config.engine.attach or config.algo.kind == "sft":
        return
    key = "engine.python" if config.engine.python else "roles.rollout.python"
    try:
        folder = _folder(config, actor, answers)
    except MyxaError as error:
        yield ConfigFinding(key, error)
        return
    if folder is None:
        return
    if not folder:
        shown = config.engine.python or actor.python or "the launcher's own interpreter"
        error = ConfigError(
            f'{key}: {shown} has no module "sglang", which roles.rollout.kind = "sglang" needs to launch servers',
            remedy="set engine.python to an interpreter that has SGLang, or name running servers in engine.attach",
        )
        yield ConfigFinding(key, error)
        return
    yield from name_findings(config.sglang, server_arguments(Path(folder)))


def _folder(config: RunConfig, actor: ActorSpec, answers: Mapping[str, Answer]) -> str | None:
    """Of SGLang; empty: it is not there; None: the role's interpreter cannot be asked, which is told elsewhere."""
    if config.engine.python:
        return folder_of_sglang(config.engine.python, actor.env)
    answer = answers.get("rollout")
    if answer is None or isinstance(answer, MyxaError):
        return None
    return answer.folders.get("sglang", "")


def name_findings(table: Mapping[str, object], known: frozenset[str]) -> Iterator[ConfigFinding]:
    """Keys of `[sglang]` that this SGLang does not have; nothing is known of it when `known` is empty."""
    for name in table:
        if known and name not in known:
            error = ConfigError(
                f"sglang.{name}: the installed SGLang has no such argument", remedy=suggest(name, known)
            )
            yield ConfigFinding(f"sglang.{name}", error)


@cache
def server_arguments(folder: Path) -> frozenset[str]:
    """Fields of ServerArgs by its source; empty if it is not where or what it was in 0.5.17."""
    try:
        tree = ast.parse((folder / SOURCE).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASS and not node.bases]
    fields = [node.target for found in classes for node in found.body if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
