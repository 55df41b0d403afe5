"""What pydantic knows of a section's fields, in the terms of a run file: dotted paths, keys, texts about types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from pydantic.fields import FieldInfo

from .section import Meaning, Means, Section
from .tables import KeyPath


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that is a table with fixed keys, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in a file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def walk(section: type[Section], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of a section and of the sections in it, tables before their keys."""
    for key, field in keys_of(section).items():
        path = (*prefix, key)
        yield path, field
        below = section_of(field)
        if below is not None:
            yield from walk(below, path)


def find(section: type[Section], path: Sequence[str]) -> tuple[type[Section], FieldInfo | None, KeyPath]:
    """The innermost section on the way of `path`, its field (None: unknown, or the section itself), what is left."""
    for at, key in enumerate(path):
        field = keys_of(section).get(key)
        if field is None:
            return section, None, tuple(path[at:])
        below = section_of(field)
        if below is None:
            return section, field, tuple(path[at + 1 :])
        section = below
    return section, None, ()


@cache
def paths_with_meaning(section: type[Section]) -> tuple[tuple[KeyPath, Meaning], ...]:
    """All keys whose text is a path or holds one."""
    return tuple(
        (path, mark.meaning) for path, field in walk(section) for mark in field.metadata if isinstance(mark, Means)
    )
