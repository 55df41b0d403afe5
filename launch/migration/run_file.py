"""`myxa migrate`: arguments of another program -> a run file that loads, with a comment that says from where each value
came, and lists of all the rest. What becomes of an argument is in `peers.table`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...core.config.loading import Finding, inspect_config, toml_value
from .arguments import SECRET, GivenArguments, has_gap, hidden, read_flags, read_hydra
from .conversions import Hand, convert, scalar

Peer = Literal["slime", "verl"]
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


class PeerRow(NamedTuple):
    """One line of the table."""

    only_if: str
    names: tuple[str, ...]
    key: str
    how: str
    defaults: tuple[str, ...]
    remark: str


def section_of(peer: Peer) -> list[str]:
    """The table's lines about that program."""
    text = (files("myxa.launch.migration") / "peers.table").read_text()
    return text.partition(f"[{peer}]\n")[2].partition("\n[")[0].strip().splitlines()


def rows(peer: Peer) -> Iterator[PeerRow]:
    for line in section_of(peer):
        names, key, how, defaults, remark = (cell.strip() for cell in line.split("|", 4))
        only_if, _, names = names.rpartition("? ")
        yield PeerRow(only_if, tuple(names.split()), key, how, tuple(defaults.split()), remark)


@dataclass(slots=True)
class Migration:
    """What was made of a file."""

    peer: Peer
    found: GivenArguments
    values: dict[str, tuple[Any, str, tuple[str, ...]]] = field(default_factory=dict[str, Any])
    """Key -> value, comment, the arguments that it came from."""
    lists: dict[str, list[str]] = field(default_factory=lambda: {name: list[str]() for name in LISTS})
    seen: set[str] = field(default_factory=set[str])
    listed: set[str] = field(default_factory=set[str])

    def shown(self, name: str) -> str:
        value, line = self.found.given[name]
        words = "" if value is True and self.peer == "slime" else toml_value(value).replace('"', "")
        words = "..." if SECRET.search(name) else hidden(words)
        return f"{'--' if self.peer == 'slime' else ''}{name} {words:.100}".strip() + f" (line {line})"

    def says(self, kind: str, names: Sequence[str], sentence: str) -> None:
        self.seen.update(names)
        self.listed.update(names)
        self.lists[kind].append(f"{'; '.join(map(self.shown, names))}{': ' if names else ''}{sentence}")

    def apply(self, row: PeerRow) -> None:
        """Convert or list the arguments that the row names."""
        given = self.found.given
        names = tuple(dict.fromkeys(name for name in row.names if name in given))
        fits = (name for name in given if any(fnmatchcase(name, one) for one in row.names))
        fresh = [name for name in fits if name not in self.seen]
        if row.only_if and (row.only_if not in given or scalar(given[row.only_if].value) is not True):
            self.seen.update((row.only_if, *row.names))
            return
        self.seen.update({row.only_if} & set(given))
        if not row.key:
            for name in fresh:
                self.says("gone" if given[name].value is None else row.how, [name], row.remark)
            if row.names == ("@",):
                self.says(row.how, (), row.remark)
        elif "*" in row.key[1:]:
            for name in fresh:
                rest = name.removeprefix(row.names[0].rstrip("*")).replace("-", "_")
                if re.fullmatch(r"\w+", rest):
                    self._use(row, row.key.replace("*", rest), (name,))
                else:
                    self.says("hand", [name], f"is no name that {row.key} can have")
        elif row.how.endswith("!") or (fresh if row.key == "*" else names or row.defaults):
            self._use(row, row.key, names)

    def _use(self, row: PeerRow, key: str, names: tuple[str, ...]) -> None:
        asked = names if "*" in row.key[1:] else row.names
        values = [self._value(row, *one) for one in zip_longest(asked, row.defaults, fillvalue="-")]
        own = "your function; its arguments are others here" if row.how == "function" else ""
        try:
            made = convert(key, row.how.rstrip("!"), values)
            tomllib.loads(f"made = {toml_value(list(made.values()))}")
        except (Hand, TypeError, ValueError, ArithmeticError) as cause:
            made = {"": str(cause) if isinstance(cause, Hand) else f"has a form that is not understood ({key})"}
        own = made.pop("", own) or ("known where the script runs only" if has_gap(str(made)) else "")
        if own:
            self.says("hand", names, f"{own}{f' ({row.remark})' if row.remark else ''}")
        self.seen.update(names)
        self._write(row, made, (row.only_if, *names) if row.only_if else names)

    def _value(self, row: PeerRow, name: str, default: str) -> Any:
        """Of one argument; its default if the file does not say it, None if there is none."""
        value = self.found.given[name].value if name in self.found.given else None
        if name == "@program":
            return self.found.program
        if SECRET.search(name) and value is not None:
            self.says("hand", [name], "a secret is never written into a run file")
        elif has_gap(value) and row.how not in KEEPS_GAPS:
            self.says("hand", [name], "is known where the script runs only; its default there was taken, if it has one")
        elif value is not None:
            return value
        return None if default == "-" else default

    def _write(self, row: PeerRow, made: dict[str, Any], names: tuple[str, ...]) -> None:
        default = self.found.program if row.names == ("@program",) else ""
        source = "; ".join(map(self.shown, names)) or default or f"{self.peer}'s default"
        for key, value in made.items():
            before = self.values.pop(key, ("", "", ()))[2]
            self.values[key] = value, source + (f": {row.remark}" if row.remark and names else ""), names
            if not set(before) <= set(names):
                self.says("gone", before, f"{key} is what {source} says")
            source = f"as {next(iter(made))}"

    def finish(self) -> None:
        """What the table does not have is unknown; what the loader refuses is for the user's hand."""
        for key in [key for key in NEEDED if key not in self.values]:
            self.values[key] = NEEDED[key], "a name that stands for yours", ()
            self.lists["hand"].append(f"{key}: the file does not name one")
        if self.values.get("algo.kind", ("",))[0] == "sft":
            self._take_away([one for one in self.values if one.startswith(GENERATES)], "gone", "nothing is generated")
        while self._mended():
            pass
        kept = self.listed.union(*(names for _, _, names in self.values.values()))
        for name in [name for name in self.found.given if name not in kept]:
            kind = "gone" if name in self.seen else "unknown"
            self.says(kind, [name], "changes nothing as it is set" if name in self.seen else "is not in the table")

    def _problems(self, without: Collection[str] = ()) -> tuple[Finding, ...]:
        """What the loader refuses of the file, if it does not have these keys."""
        held = self.values
        self.values = {key: one for key, one in held.items() if key not in without}
        self.values |= {key: (NEEDED[key], "", ()) for key in NEEDED if key in without}
        try:
            return inspect_config(["run.toml"], text=self.text()).problems
        finally:
            self.values = held

    def _mended(self) -> bool:
        """Take away what makes the loader refuse a key: the fewest values without which it does not."""
        problems = self._problems()
        if not problems:
            return False
        key, left = problems[0].key, [one for one, (value, _, _) in self.values.items() if NEEDED.get(one) != value]
        section = key.partition(".")[0]
        tables = [section, *dict.fromkeys(one.partition(".")[0] for one in left)]
        ways = [[one for one in left if f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.")]]
        ways += [[one for one in left if one.partition(".")[0] == table] for table in tables]

        def is_gone(without: Collection[str], others_come: bool) -> bool:
            keys = {one.key for one in self._problems(without)}
            return key not in keys and (others_come or keys <= {one.key for one in problems})

        tries = ((set(way), others_come) for others_come in (False, True) for way in ways if way)
        found, others_come = next((one for one in tries if is_gone(*one)), (set(left), True))
        for one in [one for one in left if one in found and len(found) > 1]:
            found -= {one} if is_gone(found - {one}, others_come) else set()
        self._take_away([one for one in left if one in found], "hand", " ".join(str(problems[0].error).split()))
        return bool(found)

    def _take_away(self, keys: Sequence[str], kind: str, why: str) -> None:
        for key in keys:
            value, _, names = self.values.pop(key)
            shown = "; ".join(map(self.shown, names)) or f"{self.peer}'s default {toml_value(value)}"
            if names or kind == "hand":
                self.lists[kind].append(f"{shown}: {key} was left out: {why:.300}")
            self.listed.update(names)
            if key in NEEDED:
                self.values[key] = NEEDED[key], "a name that stands for yours", ()

    def text(self) -> str:
        """The run file."""
        tables: dict[str, list[str]] = {}
        for key, (value, comment, _) in self.values.items():
            *above, name = (one if re.fullmatch(r"[A-Za-z0-9_-]+", one) else toml_value(one) for one in key.split("."))
            tables.setdefault(".".join(above), []).append(f"{name} = {toml_value(value)}  # {_plain(comment)}")
        lines = [f"# Made by `myxa migrate {self.peer}`. Beside each value: the argument that it came from."]
        for table, pairs in tables.items():
            lines += ["", f"[{table}]", *pairs]
        for kind, title in LISTS.items():
            listed = dict.fromkeys(self.lists[kind])
            lines += ["", f"# What {title}:", *(f"# * {_plain(one)}" for one in listed)] if listed else []
        return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """One line that a comment of TOML can hold."""
    return "".join(one if one.isprintable() else "?" for one in text)


def migrate(peer: Peer, file: Path) -> Migration:
    """Raises ConfigError where the file cannot be read or gives no arguments."""
    found = (read_flags if peer == "slime" else read_hydra)(file, PROGRAMS[peer])
    if not found.given:
        raise found.error(0, f"calls no training program of {peer}, and is no list of its arguments")
    made = Migration(peer, found)
    made.lists["said"] = found.remarks
    for row in rows(peer):
        made.apply(row)
    made.finish()
    return made
