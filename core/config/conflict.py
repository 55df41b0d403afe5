"""Values that are right one by one and wrong together, and how pydantic carries them to the loader."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import PydanticCustomError

CONFLICTS = "conflicts"
"""Type of the pydantic error whose context holds all conflicts found in one section."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Dotted paths that cannot go together, relative to the section that found it; the first is the one to change."""

    paths: tuple[str, ...]
    cause: str


def conflict_error(conflicts: tuple[Conflict, ...]) -> PydanticCustomError:
    """One pydantic error for all of them."""
    text = "; ".join(f"{conflict.paths[0]}: {conflict.cause}" for conflict in conflicts)
    # The text goes in through the context: pydantic would read braces in a template as its own.
    return PydanticCustomError(CONFLICTS, "{text}", {"text": text, "conflicts": conflicts})
