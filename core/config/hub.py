"""Names of the Hugging Face hub, where a run file names a model folder or data files.

    model      [hf://]org/name[@revision]
    data set   [hf://datasets/]org/name[@revision][:split | :config[:split]]
               hf://datasets/org/name[@revision]/file-or-pattern

A slash in the revision of a data set is written as %2F, for what follows a plain one is a file, but in `refs/pr/7`.
Without `hf://` it is a path where there is a folder `org`. A frozen run file has `hf://` and a commit, and of data sets
the files, so it means one thing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import quote, unquote

from pydantic import AfterValidator

from .section import Means, check_path_text

HUB, DATASETS = "hf://", "datasets/"
COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
_WORD = r"(?:[\w.+-]|%[0-9A-Fa-f]{2})+"
FORMS = {
    "model": re.compile(rf"{_REPO}(?:@(?P<revision>{_WORD}(?:/{_WORD})*))?"),
    "dataset": re.compile(
        rf"{_REPO}(?:@(?P<revision>refs/(?:convert|pr)/{_WORD}|{_WORD}))?(?:(?P<parts>(?::[^:/@]+){{0,2}})|/(?P<file>.+))"
    ),
}
SLICE = re.compile(r"@\[.*\]$", re.DOTALL)
DATA_FILE = re.compile(r"[^@:]*\.(jsonl?|ndjson|parquet|arrow|feather|ipc|csv|tsv|txt|gz|zst|bz2|xz|zip|db|sqlite)")
"""A missing file, and no data set."""

SPECIAL = re.compile(r"refs/(?:convert|pr)/[^/]+")
BACK = frozenset({"..", "."})
Kind = Literal["model", "dataset"]
KINDS: Mapping[str, Kind] = {"model": "model", "sources": "dataset"}
"""By what a text of the run file means."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, and what of it is meant."""

    kind: Kind
    repo: str
    revision: str = ""
    """Branch, tag or commit; empty = the main branch."""
    parts: tuple[str, ...] = ()
    """Of a data set: split, config, or both; empty = its only one."""
    file: str = ""
    """Of a data set: a path in it, or a pattern of them."""

    @classmethod
    def of(cls, kind: Kind, text: str) -> Self:
        """Raises ValueError for what is no such name."""
        match = FORMS[kind].fullmatch(text.removeprefix(HUB).removeprefix(DATASETS if kind == "dataset" else ""))
        fields = {key: value or "" for key, value in match.groupdict().items()} if match else {}
        parts, file = fields.pop("parts", ""), fields.get("file", "")
        revision = fields["revision"] = unquote(fields.get("revision", ""))
        if match is None or "@[" in file or not revision.isprintable() or BACK & {*f"{file}/{revision}".split("/")}:
            more = "org/name@revision" if kind == "model" else "datasets/org/name@revision:config:split"
            raise ValueError(f"a name of the hub must look like {HUB}{more}")
        return cls(kind, parts=tuple(filter(None, parts.split(":"))), **fields)

    def __str__(self) -> str:
        is_plain = self.kind == "model" or SPECIAL.fullmatch(self.revision)
        revision = f"@{quote(self.revision, safe='+/' if is_plain else '+')}" if self.revision else ""
        place = f"/{self.file}" if self.file else "".join(f":{part}" for part in self.parts)
        return f"{HUB}{DATASETS if self.kind == 'dataset' else ''}{self.repo}{revision}{place}"


def hub_text(text: str, kind: Kind, folder: Path) -> str:
    """A name of the hub with its `hf://`, slice and all; empty for a path. `folder`: what paths are relative to."""
    if text.startswith(HUB):
        return text
    name = SLICE.sub("", text)
    match = FORMS[kind].fullmatch(name)
    is_file = kind == "dataset" and DATA_FILE.fullmatch(name)
    if match is None or match.groupdict().get("file") or is_file:
        return ""
    if os.path.lexists(folder / match["repo"].partition("/")[0]):
        return ""
    return f"{HUB}{DATASETS if kind == 'dataset' else ''}{text}"


def _check_model(text: str) -> str:
    if not text.startswith(HUB):
        return check_path_text(text, "a folder, or a model of the hub: org/name")
    HubName.of("model", text)
    return text


ModelPath = Annotated[str, Means("model"), AfterValidator(_check_model)]
"""A model folder, or its name on the hub."""
