"""A profile of the engine behind a rollout actor, where the engine is one that profiles itself."""

from __future__ import annotations

from ...core.engine_profile import EngineTrace, ProfilesItself
from ...core.errors import EngineError
from ...core.protocols import Engine


async def profile_engine(engine: Engine | None, duration_s: float, name: str) -> tuple[EngineTrace, ...]:
    """Empty where there is nothing beside the actor's own process. A refusal is an answer here: it says nothing of
    whether the engine serves, and the actor goes on."""
    if not isinstance(engine, ProfilesItself):
        return ()
    try:
        return await engine.profile(duration_s)
    except EngineError as err:
        return (EngineTrace(engine=name, refused=str(err)),)
