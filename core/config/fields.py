"""What pydantic knows of a section's fields, in the terms of a run file: dotted paths, keys, texts about types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from .section import Meaning, Means, Section
from .tables import KeyPath

ANY_NAME = "*"
"""Stands in a path for any key of a table whose keys are names of the user's."""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that is a table with fixed keys, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def named_section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of the tables in a field that is a table of tables by names of the user's, else None."""
    kind: Any = field.annotation
    inner: Any = get_args(kind)[-1] if get_origin(kind) is dict else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in a file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def walk(section: type[Section], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of a section and of the sections in it, tables before their keys; `ANY_NAME` stands for names of the
    user's."""
    for key, field in keys_of(section).items():
        path = (*prefix, key)
        yield path, field
        below = section_of(field)
        if below is not None:
            yield from walk(below, path)
        named = named_section_of(field)
        if named is not None:
            yield from walk(named, (*path, ANY_NAME))


def find(section: type[Section], path: Sequence[str]) -> tuple[type[Section], FieldInfo | None, KeyPath]:
    """The innermost section on the way of `path`, its field (None: unknown, or the section itself), what is left."""
    at = 0
    while at < len(path):
        field = keys_of(section).get(path[at])
        if field is None:
            return section, None, tuple(path[at:])
        below, named = section_of(field), named_section_of(field)
        at += 1
        if named is not None and at < len(path):
            below, at = named, at + 1
        if below is None:
            return section, field, tuple(path[at:])
        section = below
    return section, None, ()


@cache
def paths_with_meaning(section: type[Section]) -> tuple[tuple[KeyPath, Meaning], ...]:
    """All keys whose text is a path or holds one."""
    return tuple(
        (path, mark.meaning) for path, field in walk(section) for mark in field.metadata if isinstance(mark, Means)
    )
