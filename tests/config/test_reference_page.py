"""docs/config.md is what the section classes say; this program writes it: `python -m tests.config.test_reference_page`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from myxa.core.config import RunConfig
from myxa.core.config.learning import DEFAULTS_OF_KIND, AlgoConfig
from myxa.core.config.loading import json_schema, value_text
from myxa.core.config.run import RoleSettings, RolesSettings
from myxa.core.config.section import Means, Section, keys_of, named_section_of, section_of, walk

PAGE = Path(__file__).parents[2] / "docs" / "config.md"

HEAD = """# The run file

One TOML file describes a run; `myxa up run.toml` starts it. The smallest one names `[model] path` and `[data] train`. \
`python -m tests.config.test_reference_page` makes this page from the section classes in `core/config`.

* Several files are merged key by key, later ones win; `--set section.key=value` wins over files (TOML values; a bare word is text). \
A table given there replaces the files' table.
* An unknown key, a wrong type or a value out of range is an error. All errors of a file are reported at once.
* A relative path is relative to its file; in `--set`, to the current folder. `~` is the home folder.
* Durations are in seconds, sizes in tokens, log-probs in nats, unless a key says otherwise.
* `algo.kind = "sft"` makes `"demonstration"` and `1` the defaults of `rollout.workflow` and `rollout.num_samples`.
* `myxa schema` prints the JSON Schema of these keys, for editors.

A line is: key (values; default): meaning.
"""

ROLES = """What differs from `[roles.<role>]`. All but trainer and rollout are one actor each, the memory manager (absent without \
`memory.share`) with an agent on each further one of `nodes`."""
EXPLAINED_BY = {
    "data.sources.NAME": ("data",),
    "eval.sets.NAME": ("data", "eval"),
    "reward.functions.NAME": ("reward",),
    "models.NAME": ("roles.<role>",),
}
"""Sections whose keys a named table shares: there they are explained, and there is their default."""
OTHER_MEANING = frozenset({("reward.functions.NAME", "fn")})
"""Shared keys that mean something else in the named table."""

MEANING_TEXT = {
    "path": "path",
    "model": "path or hub id",
    "sources": "path or hub id, or array of them",
    "code": "name",
    "program": "program",
}
SIMPLE_TEXT: Mapping[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
BOUND_TEXT = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


def render_reference() -> str:
    """`docs/config.md`."""
    parts = [HEAD]
    for key, info in keys_of(RunConfig).items():
        section = section_of(info)
        if section is RolesSettings:
            parts += _role_parts()
        elif section is not None:
            parts += [_section_part(f"[{key}]", section, keys_of(section)), *_named_parts(key, section)]
        elif (section := named_section_of(info)) is not None:
            parts.append(_named_part(f"{key}.NAME", section))
    return "\n".join(parts)


def _kind_table() -> list[str]:
    """What keys that follow `algo.kind` are where they are left out."""
    rows = [
        f"| `{kind}` | {row.clip_low:g} | {row.clip_high:g} | `{row.reduction}` | `{row.group_filter}` | {row.source} |"
        for kind, row in DEFAULTS_OF_KIND.items()
    ]
    head = "| kind | `clip_low` | `clip_high` | `reduction` | `group_filter` | source |"
    return ["\nDefaults that follow `kind`:\n", head, "|---|---|---|---|---|---|", *rows]


def _named_parts(key: str, section: type[Section]) -> Iterator[str]:
    """Tables below a section whose names are the user's. Keys that another section explains are named only."""
    for name, info in keys_of(section).items():
        if (named_section := named_section_of(info)) is not None:
            yield _named_part(f"{key}.{name}.NAME", named_section)


def _named_part(title: str, section: type[Section]) -> str:
    keys, notes = dict(keys_of(section)), list[str]()
    for other in EXPLAINED_BY.get(title, ()):
        explained = RoleSettings if other == "roles.<role>" else section_of(keys_of(RunConfig)[other])
        shared = [key for key in keys if explained and key in keys_of(explained)]
        shared = [key for key in shared if (title, key) not in OTHER_MEANING]
        notes.append(f"As in `[{other}]`: {', '.join(f'`{one}`' for one in shared)}.")
        keys = {key: info for key, info in keys.items() if key not in shared}
    return _section_part(f"[{title}]", section, keys, notes)


def _role_parts() -> list[str]:
    base, rows = keys_of(RoleSettings), list[str]()
    for name, info in keys_of(RolesSettings).items():
        role = section_of(info)
        for key, own in keys_of(role).items() if role else ():
            same = [info for info in (base.get(key),) if info and _meaning(info) == _meaning(own)]
            rows += [] if same or _is_fixed(own) else [_row(f"{name}.{key}", own)]
    return [_section_part("[roles.<role>]", RoleSettings, base), "\n".join(["## [roles] by role", ROLES, *rows, ""])]


def _meaning(info: FieldInfo) -> tuple[object, ...]:
    return info.annotation, info.default, info.description


def _is_fixed(info: FieldInfo) -> bool:
    """Whether there is nothing to choose: one word, or one number."""
    bounds = {name: getattr(mark, name) for mark in info.metadata for name in ("ge", "le") if hasattr(mark, name)}
    is_one_number = "ge" in bounds and bounds.get("ge") == bounds.get("le")
    return is_one_number or (get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1)


def _section_part(title: str, section: type[Section], keys: Mapping[str, FieldInfo], notes: Sequence[str] = ()) -> str:
    about = " ".join((section.__doc__ or "").split())
    table = _kind_table() if section is AlgoConfig else []
    return "\n".join([f"## {title}", about, *notes, *(_row(key, info) for key, info in keys.items()), *table, ""])


def _row(key: str, info: FieldInfo) -> str:
    if section_of(info) is not None:
        return f"* `{key}` (table): {' '.join((info.description or '').split())}"
    default = "**required**" if info.is_required() else f"`{value_text(info.default)}`"
    return f"* `{key}` ({_kind_text(info)}; {default}): {' '.join((info.description or '').split())}"


def _kind_text(info: FieldInfo) -> str:
    meant = [MEANING_TEXT[mark.meaning] for mark in info.metadata if isinstance(mark, Means)]
    if meant == ["name"] and info.annotation is not str:  # an array of names, or a table by name
        meant = []
    bounds = [
        f"{words} {getattr(mark, attr):g}"
        for mark in info.metadata
        for kind, attr, words in BOUND_TEXT
        if isinstance(mark, kind)
    ]
    bounds += ["not empty" for mark in info.metadata if isinstance(mark, MinLen)]
    return meant[0] if meant else ", ".join([_type_text(info.annotation), *bounds])


def _type_text(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if kind in SIMPLE_TEXT:
        return SIMPLE_TEXT[kind]
    if origin is Annotated:
        return _type_text(args[0])
    if origin is Literal:
        return ", ".join(f"`{value_text(choice)}`" for choice in args)
    if origin in (Union, UnionType):
        return " or ".join(_type_text(one) for one in args)
    if origin is tuple:
        items = [one for one in args if one is not Ellipsis]
        return f"array of {'' if Ellipsis in args else f'{len(items)} '}{_type_text(items[0])}s"
    if origin is dict:
        return "tables" if isinstance(args[-1], type) and issubclass(args[-1], Section) else "table"
    return str(kind)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render_reference(), "write it again: python -m tests.config.test_reference_page"


def test_every_key_is_described_and_listed() -> None:
    page = PAGE.read_text()
    for path, field in walk(RunConfig):
        about = field.description or getattr(section_of(field), "__doc__", "")
        assert about, f"{'.'.join(path)} has no docstring"
        if path[0] != "roles" and len(path) == 2:
            assert f"* `{path[1]}` (" in page, path


def test_the_schema_for_editors_has_every_key_with_its_meaning_and_unit() -> None:
    schema = json_schema()
    assert list(schema["properties"]) == list(keys_of(RunConfig))
    for key, field in keys_of(RunConfig).items():
        section = section_of(field)
        for name, info in keys_of(section).items() if section else ():
            row = schema["$defs"][section.__name__ if section else ""]["properties"][name]
            assert "$ref" in row or row["description"] == info.description, f"{key}.{name}"
    rows = schema["$defs"]["RolloutSettings"]["properties"]
    assert (rows["timeout_s"]["x-unit"], rows["num_samples"]["minimum"]) == ("seconds", 1)
    assert schema["$defs"]["DataSettings"]["additionalProperties"] is False


if __name__ == "__main__":
    PAGE.write_text(render_reference())
