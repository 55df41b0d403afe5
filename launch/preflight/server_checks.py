"""Checks SGLang servers before a run starts: those that it launches, and those of `engine.attach`.

For launched servers: the interpreter has SGLang, and SGLang knows the arguments of `[sglang]`. Their names are read
from the source text of ServerArgs, without importing it; the rollout actor asks the class itself later. For attached
servers: they answer over HTTP and serve the run's model (`actors/engines/sglang/attach_check.py` judges the answers).
"""

from __future__ import annotations

import ast
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

from ...actors.engines.sglang.attach_check import FACTS_ROUTE, MODEL_ROUTE, ServerAnswer, attach_fault
from ...core.config import RunConfig
from ...core.errors import ConfigError, MyxaError
from ...core.suggestion import suggest
from ..actor_spec import ActorSpec
from .finding import ConfigFinding
from .interpreters import AskedInterpreter, folder_of_sglang

ANSWER_S = 2.0
"""Within which a server must answer a look."""
ABSENT_S = 7.0
"""How long a run that is started waits for a server that is not there."""
MAX_ANSWER_BYTES = 1 << 20
LOOK_EVERY_S = 0.2
AT_ONCE = 16
ROUTES = (MODEL_ROUTE, FACTS_ROUTE)


def attached_findings(
    config: RunConfig, actors: Sequence[ActorSpec], model_type: str, *, wait_s: float = 0.0
) -> Iterator[ConfigFinding]:
    """Servers of `engine.attach` that do not fit. A missing one is a warning, unless it was waited for."""
    rollouts = [actor for actor in actors if actor.role == "rollout"]
    name = config.engine.key_env
    key = os.environ.get(name) or rollouts[0].env.get(name, "") if name and rollouts else ""
    if not rollouts or not config.engine.attach or (name and not key):
        return
    look = partial(_fault, key=key, model_type=model_type, wait_s=wait_s)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for url, (fault, remedy, may_come) in zip(
            config.engine.attach, pool.map(look, config.engine.attach), strict=True
        ):
            if fault:
                error = ConfigError(f"engine.attach: {url}: {fault}", remedy=remedy)
                yield ConfigFinding("engine.attach", error, is_warning=may_come and not wait_s)


def _fault(url: str, *, key: str, model_type: str, wait_s: float) -> tuple[str, str, bool]:
    until = time.monotonic() + wait_s
    while True:
        model, facts = (_ask(url, route, key) for route in ROUTES)
        fault, remedy = attach_fault(model, facts, model_type)
        may_come = model.may_come or facts.may_come
        if not (fault and may_come) or time.monotonic() + ANSWER_S > until:
            return fault, remedy, may_come
        threading.Event().wait(LOOK_EVERY_S)


def _ask(url: str, route: str, key: str) -> ServerAnswer:
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        link = connect(parts.hostname or "", parts.port, timeout=ANSWER_S)
        try:
            link.request("GET", parts.path.rstrip("/") + route, headers=headers)
            answer = link.getresponse()
            return ServerAnswer(route, answer.status, answer.read(MAX_ANSWER_BYTES))
        finally:
            link.close()
    except (TimeoutError, ConnectionRefusedError, socket.gaierror) as error:
        why = f"no answer within {ANSWER_S:g} s" if isinstance(error, TimeoutError) else str(error)
        return ServerAnswer(route, error=why, is_absent=True)
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as error:
        return ServerAnswer(route, error=f"no HTTP ({type(error).__name__}: {str(error)[:80]})")


SOURCE = Path("srt/server_args.py")
CLASS = "ServerArgs"


def sglang_findings(
    config: RunConfig, actors: Sequence[ActorSpec], answers: Mapping[str, AskedInterpreter]
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


def _folder(config: RunConfig, actor: ActorSpec, answers: Mapping[str, AskedInterpreter]) -> str | None:
    """SGLang's folder; empty: it is missing; None: the role's interpreter does not answer, a separate finding."""
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
