"""`docs/config.md` and the JSON Schema for editors, made from the section classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from .learning import DEFAULTS_OF_KIND, AlgoConfig
from .loading import value_text
from .root import RunConfig
from .run import RoleSettings, RolesSettings
from .section import Means, Section, keys_of, named_section_of, section_of

HEAD = """# The run file

One TOML file describes a run; `myxa up run.toml` starts it. The smallest one names `[model] path` and `[data] train`.
`myxa.core.config.reference.render_reference` makes this page from the section classes in `core/config`.

* Several files are merged key by key, later ones win; `--set section.key=value` wins over files (TOML values; a bare
  word is text). A table given there replaces the files' table.
* An unknown key, a wrong type or a value out of range is an error. All errors of a file are reported at once.
* A relative path is relative to its file; in `--set`, to the current folder. `~` is the home folder.
* Durations are in seconds, sizes in tokens, log-probs in nats, unless a key says otherwise.
* `algo.kind = "sft"` makes `"demonstration"` and `1` the defaults of `rollout.workflow` and `rollout.num_samples`.
* `myxa schema` prints the JSON Schema of these keys, for editors.

A line is: key (values; default): meaning.
"""

ROLES = """What differs from `[roles.<role>]`. Coordinator, buffer, monitor and memory manager are one actor each. The
memory manager runs on the first of `nodes`, with an agent on each other node; without `memory.share` it is absent."""
EXPLAINED_BY = {
    "data.sources.NAME": ("data",),
    "eval.sets.NAME": ("data", "eval"),
    "reward.functions.NAME": ("reward",),
}
"""Sections whose keys a named table shares: there they are explained, and there is their default."""
OTHER_MEANING = frozenset({("reward.functions.NAME", "fn")})
"""Shared keys that mean something else in the named table."""

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


UNITS = {"_s": "seconds", "_mb": "MiB", "_gb": "GiB"}


def json_schema() -> dict[str, Any]:
    """For editors: every key with its type, range, default and meaning; `x-unit` where its name says one."""
    schema = RunConfig.model_json_schema()
    schema["$defs"]["DataSettings"].pop("required")  # `sources` may take the place of `train`
    for section in schema["$defs"].values():
        for key, field in section.get("properties", {}).items():
            unit = next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")
            field.update({"x-unit": unit} if unit else {})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _kind_table() -> str:
    """What keys that follow `algo.kind` are where they are left out."""
    rows = [
        f"| `{kind}` | {one.clip_low:g} | {one.clip_high:g} | `{one.reduction}` | `{one.group_filter}` | {one.source} |"
        for kind, one in DEFAULTS_OF_KIND.items()
    ]
    head = ["| kind | `clip_low` | `clip_high` | `reduction` | `group_filter` | source |", "|---|---|---|---|---|---|"]
    return "\n".join(["Defaults that follow `kind`:", "", *head, *rows, ""])


def _named_parts(key: str, section: type[Section]) -> Iterator[str]:
    """Tables below a section whose names are the user's. Keys that another section explains are named only."""
    for name, field in keys_of(section).items():
        named, title = named_section_of(field), f"{key}.{name}.NAME"
        if named is None:
            continue
        keys, notes = dict(keys_of(named)), list[str]()
        for other in EXPLAINED_BY.get(title, ()):
            explained = section_of(keys_of(RunConfig)[other])
            shared = [one for one in keys if explained and one in keys_of(explained)]
            shared = [one for one in shared if (title, one) not in OTHER_MEANING]
            notes.append(f"As in `[{other}]`: {', '.join(f'`{one}`' for one in shared)}.")
            keys = {one: info for one, info in keys.items() if one not in shared}
        yield _section_part(f"[{title}]", named, keys, notes)


def _role_parts() -> Iterator[str]:
    yield _section_part("[roles.<role>]", RoleSettings, keys_of(RoleSettings))
    rows: list[str] = []
    for name, field in keys_of(RolesSettings).items():
        section = section_of(field)
        if section is not None:
            own = {key: info for key, info in keys_of(section).items() if _differs(key, info) and _is_free(info)}
            rows += [_row(f"{name}.{key}", info) for key, info in own.items()]
    yield "\n".join(["## [roles] by role", ROLES, *rows, ""])


def _differs(key: str, field: FieldInfo) -> bool:
    base = keys_of(RoleSettings).get(key)
    return base is None or (base.annotation, base.default, base.description) != (
        field.annotation,
        field.default,
        field.description,
    )


def _is_free(field: FieldInfo) -> bool:
    """Whether there is anything to choose: more than one word, or more than one number."""
    bounds = {name: getattr(mark, name) for mark in field.metadata for name in ("ge", "le") if hasattr(mark, name)}
    is_one_number = "ge" in bounds and bounds.get("ge") == bounds.get("le")
    return not is_one_number and (get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1)


def _section_part(title: str, section: type[Section], keys: Mapping[str, FieldInfo], notes: Sequence[str] = ()) -> str:
    about = inspect.cleandoc(section.__doc__ or "")
    rows = [_row(key, field) for key, field in keys.items()]
    return "\n".join([f"## {title}", *([about] if about else []), *notes, *rows, ""])


def _row(key: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{_default_text(field.default)}`"
    about = " ".join((field.description or "").split())
    return f"* `{key}` ({_kind_text(field)}; {default}): {about}"


def _default_text(value: object) -> str:
    return "{}" if value == {} else value_text(value)


def _kind_text(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Means):
            return MEANING_TEXT[mark.meaning]
    return _type_text(field.annotation) + _bounds_text(field.metadata)


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
        inner = get_args(kind)[-1]
        return "tables" if isinstance(inner, type) and issubclass(inner, Section) else "table"
    return str(kind)
