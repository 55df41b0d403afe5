"""`myxa migrate`: arguments of another program -> a run file that loads, with a comment that says from where each value
came, and lists of all the rest. What becomes of an argument is in `core/config/peers.table`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...core.config.loading import Finding, inspect_config, toml_value
from ...core.config.peers import Peer, PeerRow, rows
from .arguments import SECRET, ScriptArguments, has_gap, hidden, read_flags, read_hydra
from .conversions import Hand, convert, scalar

PROGRAMS = {
    "slime": re.compile(r"(^|/)train(_async)?\.py$"),
    "verl": re.compile(r"^(recipe|verl)\.[\w.]*(\bmain_(?!generation)\w+|_main)$|(^|/)main_ppo\w*\.py$"),
}
LISTS = {
    "hand": "needs your hand", "differs": "is another default here than there", "none": "has no counterpart here",
    "gone": "is not needed here", "unknown": "is unknown to `myxa migrate`; nothing was written for it",
    "said": "was said by the file, and not done",
}  # fmt: skip
KEEPS_GAPS = ("text", "function", "paths", "eval_sets", "trackers", "reward_file")
NEEDED = {"model.path": "model", "data.train": "train.jsonl"}
"""Key that a run file must have -> a name that stands for the user's."""
GENERATES = ("rollout.", "roles.rollout.", "reward.", "async.", "memory.", "sglang.", "engine.", "weights.", "eval.")
"""Beginnings of keys that supervised training does not have."""


@dataclass(slots=True)
class Migration:
    """What was made of a file."""

    peer: Peer
    arguments: ScriptArguments
    values: dict[str, tuple[Any, str, tuple[str, ...]]] = field(default_factory=dict[str, Any])
    """Key -> value, comment, the arguments that it came from."""
    lists: dict[str, list[str]] = field(default_factory=lambda: {name: list[str]() for name in LISTS})
    seen: set[str] = field(default_factory=set[str])
    listed: set[str] = field(default_factory=set[str])

    def describe(self, name: str) -> str:
        value, line = self.arguments.by_name[name]
        value_text = "" if value is True and self.peer == "slime" else toml_value(value).replace('"', "")
        value_text = "..." if SECRET.search(name) else hidden(value_text)
        return f"{'--' if self.peer == 'slime' else ''}{name} {value_text:.100}".strip() + f" (line {line})"

    def report(self, kind: str, names: Sequence[str], sentence: str) -> None:
        self.seen.update(names)
        self.listed.update(names)
        self.lists[kind].append(f"{'; '.join(map(self.describe, names))}{': ' if names else ''}{sentence}")

    def apply(self, row: PeerRow) -> None:
        """Convert or list the arguments that the row names."""
        arguments = self.arguments.by_name
        names = tuple(dict.fromkeys(name for name in row.names if name in arguments))
        matching = (name for name in arguments if any(fnmatchcase(name, pattern) for pattern in row.names))
        new_names = [name for name in matching if name not in self.seen]
        if row.only_if and (row.only_if not in arguments or scalar(arguments[row.only_if].value) is not True):
            self.seen.update((row.only_if, *row.names))
            return
        self.seen.update({row.only_if} & set(arguments))
        if not row.key:
            for name in new_names:
                self.report("gone" if arguments[name].value is None else row.how, [name], row.remark)
            if row.names == ("@",):
                self.report(row.how, (), row.remark)
        elif "*" in row.key[1:]:
            for name in new_names:
                suffix = name.removeprefix(row.names[0].rstrip("*")).replace("-", "_")
                if re.fullmatch(r"\w+", suffix):
                    self._convert(row, row.key.replace("*", suffix), (name,))
                else:
                    self.report("hand", [name], f"is no name that {row.key} can have")
        elif row.how.endswith("!") or (new_names if row.key == "*" else names or row.defaults):
            self._convert(row, row.key, names)

    def _convert(self, row: PeerRow, key: str, names: tuple[str, ...]) -> None:
        row_names = names if "*" in row.key[1:] else row.names
        values = [self._value(row, *pair) for pair in zip_longest(row_names, row.defaults, fillvalue="-")]
        remark = "your function; its arguments are others here" if row.how == "function" else ""
        try:
            converted = convert(key, row.how.rstrip("!"), values)
            tomllib.loads(f"made = {toml_value(list(converted.values()))}")
        except (Hand, TypeError, ValueError, ArithmeticError) as cause:
            converted = {"": str(cause) if isinstance(cause, Hand) else f"has a form that is not understood ({key})"}
        remark = converted.pop("", remark) or ("known where the script runs only" if has_gap(str(converted)) else "")
        if remark:
            self.report("hand", names, f"{remark}{f' ({row.remark})' if row.remark else ''}")
        self.seen.update(names)
        self._write(row, converted, (row.only_if, *names) if row.only_if else names)

    def _value(self, row: PeerRow, name: str, default: str) -> Any:
        """Of one argument; its default if the file does not say it, None if there is none."""
        value = self.arguments.by_name[name].value if name in self.arguments.by_name else None
        if name == "@program":
            return self.arguments.program
        if SECRET.search(name) and value is not None:
            self.report("hand", [name], "a secret is never written into a run file")
        elif has_gap(value) and row.how not in KEEPS_GAPS:
            self.report(
                "hand", [name], "is known where the script runs only; its default there was taken, if it has one"
            )
        elif value is not None:
            return value
        return None if default == "-" else default

    def _write(self, row: PeerRow, converted: dict[str, Any], names: tuple[str, ...]) -> None:
        default = self.arguments.program if row.names == ("@program",) else ""
        source = "; ".join(map(self.describe, names)) or default or f"{self.peer}'s default"
        for key, value in converted.items():
            earlier_names = self.values.pop(key, ("", "", ()))[2]
            self.values[key] = value, source + (f": {row.remark}" if row.remark and names else ""), names
            if not set(earlier_names) <= set(names):
                self.report("gone", earlier_names, f"{key} is what {source} says")
            source = f"as {next(iter(converted))}"

    def finish(self) -> None:
        """What the table does not have is unknown; what the loader refuses is for the user's hand."""
        for key in [key for key in NEEDED if key not in self.values]:
            self.values[key] = NEEDED[key], "a name that stands for yours", ()
            self.lists["hand"].append(f"{key}: the file does not name one")
        if self.values.get("algo.kind", ("",))[0] == "sft":
            self._remove([key for key in self.values if key.startswith(GENERATES)], "gone", "nothing is generated")
        while self._remove_refused():
            pass
        listed_names = self.listed.union(*(names for _, _, names in self.values.values()))
        for name in [name for name in self.arguments.by_name if name not in listed_names]:
            kind = "gone" if name in self.seen else "unknown"
            self.report(kind, [name], "changes nothing as it is set" if name in self.seen else "is not in the table")

    def _problems(self, without: Collection[str] = ()) -> tuple[Finding, ...]:
        """What the loader refuses of the file, if it does not have these keys."""
        values = self.values
        self.values = {key: entry for key, entry in values.items() if key not in without}
        self.values |= {key: (NEEDED[key], "", ()) for key in NEEDED if key in without}
        try:
            return inspect_config(["run.toml"], text=self.text()).problems
        finally:
            self.values = values

    def _remove_refused(self) -> bool:
        """Take away what makes the loader refuse a key: the fewest values without which it does not."""
        problems = self._problems()
        if not problems:
            return False
        refused_key = problems[0].key
        keys = [key for key, (value, _, _) in self.values.items() if NEEDED.get(key) != value]
        tables = dict.fromkeys(key.partition(".")[0] for key in (refused_key, *keys))
        candidates = [
            [key for key in keys if f"{refused_key}.".startswith(f"{key}.") or key.startswith(f"{refused_key}.")]
        ]
        candidates += [[key for key in keys if key.partition(".")[0] == table] for table in tables]

        def is_gone(without: Collection[str], others_come: bool) -> bool:
            remaining = {problem.key for problem in self._problems(without)}
            return refused_key not in remaining and (others_come or remaining <= {problem.key for problem in problems})

        attempts = ((set(group), others_come) for others_come in (False, True) for group in candidates if group)
        removed_keys, others_come = next((attempt for attempt in attempts if is_gone(*attempt)), (set(keys), True))
        for key in [key for key in keys if key in removed_keys and len(removed_keys) > 1]:
            removed_keys -= {key} if is_gone(removed_keys - {key}, others_come) else set()
        cause = " ".join(str(problems[0].error).split())
        self._remove([key for key in keys if key in removed_keys], "hand", cause)
        return bool(removed_keys)

    def _remove(self, keys: Sequence[str], kind: str, why: str) -> None:
        for key in keys:
            value, _, names = self.values.pop(key)
            source = "; ".join(map(self.describe, names)) or f"{self.peer}'s default {toml_value(value)}"
            if names or kind == "hand":
                self.lists[kind].append(f"{source}: {key} was left out: {why:.300}")
            self.listed.update(names)
            if key in NEEDED:
                self.values[key] = NEEDED[key], "a name that stands for yours", ()

    def text(self) -> str:
        """The run file."""
        tables: dict[str, list[str]] = {}
        for key, (value, comment, _) in self.values.items():
            *above, name = (
                part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else toml_value(part) for part in key.split(".")
            )
            tables.setdefault(".".join(above), []).append(f"{name} = {toml_value(value)}  # {_plain(comment)}")
        lines = [f"# Made by `myxa migrate {self.peer}`. Beside each value: the argument that it came from."]
        for table, key_lines in tables.items():
            lines += ["", f"[{table}]", *key_lines]
        for kind, title in LISTS.items():
            entries = dict.fromkeys(self.lists[kind])
            lines += ["", f"# What {title}:", *(f"# * {_plain(part)}" for part in entries)] if entries else []
        return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """One line that a comment of TOML can hold."""
    return "".join(character if character.isprintable() else "?" for character in text)


def migrate(peer: Peer, file: Path) -> Migration:
    """Raises ConfigError where the file cannot be read or gives no arguments."""
    arguments = (read_flags if peer == "slime" else read_hydra)(file, PROGRAMS[peer])
    if not arguments.by_name:
        raise arguments.error(0, f"calls no training program of {peer}, and is no list of its arguments")
    migration = Migration(peer, arguments)
    migration.lists["said"] = arguments.remarks
    for row in rows(peer):
        migration.apply(row)
    migration.finish()
    return migration
