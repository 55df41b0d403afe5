"""`docs/config.md`, generated from the section classes, so that the page cannot differ from the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from .fields import keys_of, named_section_of, section_of
from .learning import DEFAULTS_OF_KIND, AlgoConfig
from .problems import value_text
from .roles import RoleSettings, RolesSettings
from .root import RunConfig
from .section import Means, Section

HEAD = """# The run file

One TOML file describes a run; `myxa up run.toml` starts it. This page is generated from the section classes in
`core/config` by `myxa.core.config.reference.render_reference`; a test compares the two.

* The smallest run file names a model and data: `[model] path` and `[data] train` (or `[data.sources.NAME] path`). All
  else has a default.
* Several files are merged key by key, later ones winning; `--set section.key=value` wins over files
  (TOML values; a bare word is text). A table given there, `{}` too, takes the place of the files' whole table.
* An unknown key, a wrong type or a value out of range is an error, never a warning. All errors of a file are told at
  once, each with file, line, dotted path, value and cause.
* A relative path is relative to the folder of its file; in `--set`, to the current folder. `~` is the home folder.
* Durations are in seconds, sizes in tokens, log-probs in nats, unless a key says otherwise.
* With `algo.kind = "sft"` the values left out of `rollout.workflow` and `rollout.num_samples` become `"demonstration"`
  and `1`.
"""

MEANING_TEXT = {"path": "path", "sources": "path, or array of paths", "code": "name", "program": "program"}
SIMPLE_TEXT: Mapping[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
BOUND_TEXT = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


def render_reference() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for key, field in keys_of(RunConfig).items():
        section = section_of(field)
        if section is RolesSettings:
            parts.extend(_role_parts())
        elif section is not None:
            parts.append(_section_part(f"[{key}]", section, keys_of(section)))
            if section is AlgoConfig:
                parts.append(_kind_table())
            parts.extend(_named_parts(key, section))
    return "\n".join(parts)


def _kind_table() -> str:
    """What keys that follow `algo.kind` are where they are left out."""
    rows = [
        f"| `{kind}` | {one.clip_low:g} | {one.clip_high:g} | `{one.reduction}` | `{one.group_filter}` | {one.source} |"
        for kind, one in DEFAULTS_OF_KIND.items()
    ]
    head = ["| kind | `clip_low` | `clip_high` | `reduction` | `group_filter` | source |", "|---|---|---|---|---|---|"]
    return "\n".join(["Defaults that follow `kind`:", "", *head, *rows, ""])


def _named_parts(key: str, section: type[Section]) -> Iterator[str]:
    """Tables below a section whose names are the user's."""
    for name, field in keys_of(section).items():
        named = named_section_of(field)
        if named is not None:
            yield _section_part(f"[{key}.{name}.NAME]", named, keys_of(named))


def _role_parts() -> Iterator[str]:
    yield _section_part("[roles.<role>]", RoleSettings, keys_of(RoleSettings))
    for name, field in keys_of(RolesSettings).items():
        section = section_of(field)
        if section is not None:
            own = {key: info for key, info in keys_of(section).items() if _differs(key, info)}
            yield _section_part(f"[roles.{name}]", section, own)


def _differs(key: str, field: FieldInfo) -> bool:
    base = keys_of(RoleSettings).get(key)
    return base is None or (base.annotation, base.default, base.description) != (
        field.annotation,
        field.default,
        field.description,
    )


def _section_part(title: str, section: type[Section], keys: Mapping[str, FieldInfo]) -> str:
    about = inspect.cleandoc(section.__doc__ or "")
    rows = [_row(key, field) for key, field in keys.items()]
    head = ["| key | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", about, "", *head, *rows, ""])


def _row(key: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{_default_text(field.default)}`"
    about = " ".join((field.description or "").split())
    return f"| `{key}` | {_escape(_kind_text(field))} | {_escape(default)} | {_escape(about)} |"


def _default_text(value: object) -> str:
    return "{}" if value == {} else value_text(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _kind_text(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Means):
            return MEANING_TEXT[mark.meaning]
    return _type_text(field.annotation) + _bounds_text(field.metadata)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _bounds_text(metadata: list[Any]) -> str:
    texts = [
        f"{words} {getattr(mark, attr):g}"
        for mark in metadata
        for kind, attr, words in BOUND_TEXT
        if isinstance(mark, kind)
    ]
    texts += ["not empty" for mark in metadata if isinstance(mark, MinLen)]
    return f", {', '.join(texts)}" if texts else ""


def _type_text(kind: Any) -> str:
    origin = get_origin(kind)
    if kind in SIMPLE_TEXT:
        return SIMPLE_TEXT[kind]
    if origin is Annotated:
        return _type_text(get_args(kind)[0])
    if origin is Literal:
        return ", ".join(f"`{value_text(choice)}`" for choice in get_args(kind))
    if origin in (Union, UnionType):
        return " or ".join(_type_text(one) for one in get_args(kind))
    if origin is tuple:
        items = [one for one in get_args(kind) if one is not Ellipsis]
        count = "" if Ellipsis in get_args(kind) else f"{len(items)} "
        return f"array of {count}{_type_text(items[0])}s"
    if origin is dict:
        return "tables" if _is_section(get_args(kind)[-1]) else "table"
    return str(kind)
