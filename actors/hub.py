"""Models and data sets of the Hugging Face hub: from names in the run file to files in the hub's own cache.

The launcher of each node calls `fetched`, which asks the hub, pins each name to a commit and the data sets to files.
Every other process calls `cached`, which says where these lie and asks nothing. Cache, offline mode, resumed downloads
and time limits are huggingface_hub's, and so are `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and the like.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from ..core.config import RunConfig
from ..core.config.hub import COMMIT, HUB, KINDS, SLICE, HubName
from ..core.config.loading import Finding, with_named
from ..core.config.section import KeyPath, Meaning
from ..core.daemon_thread import begin_in_daemon_thread
from ..core.errors import ConfigError, MyxaError
from ..core.suggestion import suggest

WEIGHTS = "*.safetensors"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
OTHER_WEIGHTS = ("*/*", "consolidated*", "original*")
"""The same weights in another layout."""
CARD, ALWAYS = "README.md", ".gitattributes"
"""A data set may lack the first."""
MAX_CARD_BYTES: Final = 4 << 20
MAX_CARD_PIECES: Final = 1 << 19
"""Words and signs of what a card says of its files, written out."""
DATA = re.compile(r"\.(jsonl|ndjson|json|parquet|arrow)(\.gz|\.zst)?$")
NO_DATA = re.compile(r"(^|/)(\.[^/]*|dataset_infos?\.json|dataset_dict\.json|state\.json)$")
LOOK_BYTES: Final = 256 << 20
"""What `myxa plan` fetches of a name at most, weights or rows; of more it says the size."""
SHOWN = 12
MIB, GIB = 1 << 20, 1 << 30
LOOK_EVERY_S: Final = 0.5
"""How often it is said what is done."""
BLOCK_BYTES: Final = 512
"""As stat counts what a file has on the disk."""
LOG_IN = "ask for access on its page, and log in: `hf auth login`, or HF_TOKEN"

Split = tuple[str, str]
"""Config and split."""
Say = Callable[[str], object]


def say_nothing(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True)
class HubDownload:
    """What a name of the hub still needs on this node."""

    key: str
    name: str
    num_bytes: int
    """0: all is in the cache."""
    free_bytes: int
    folder: str
    """The cache."""


def fetched(config: RunConfig, *, has_data: bool = True, say: Say = say_nothing, doing: Say = say_nothing) -> RunConfig:
    """With the commit in every name of the hub, whose files are then in this node's cache. `doing` gets, again and
    again, what is done, and how much of it. Raises ConfigError."""
    fetch = _Fetch(has_data=has_data, say=say, doing=doing)
    config = fetch.run(config)
    errors = [finding.error for finding in fetch.findings]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n  ".join(("not all can be had of the hub:", *map(str, errors))))
    return config


def looked_up(config: RunConfig) -> tuple[RunConfig, tuple[HubDownload, ...], tuple[Finding, ...]]:
    """The same without the large files; names that cannot be had stay as they are, with a finding each."""
    fetch = _Fetch(max_bytes=LOOK_BYTES)
    return fetch.run(config), tuple(fetch.downloads), tuple(fetch.findings)


def cached(config: RunConfig) -> RunConfig:
    """With paths in the cache in place of names that have their commit."""

    def path_of(text: str, meaning: Meaning, key: KeyPath) -> str:
        del key
        kind = KINDS.get(meaning)
        name = HubName.of(kind, SLICE.sub("", text)) if kind and text.startswith(HUB) else None
        if name is None or not COMMIT.fullmatch(name.revision):
            return text
        folder = f"{_folder(name)}/snapshots/{name.revision}"
        return f"{glob.escape(folder)}/{name.file}{''.join(SLICE.findall(text))}" if name.file else folder

    return with_named(config, path_of)


def lacks_weights(folder: str) -> bool:
    """Whether a folder is one of the cache, of which `looked_up` left the weights out."""
    path = Path(folder)
    return path.parent.name == "snapshots" and path.is_dir() and not any(path.glob(WEIGHTS))


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(Path(HF_HUB_CACHE).expanduser().resolve())


def _folder(name: HubName) -> str:
    """Of the repository in the cache."""
    return f"{_cache()}/{name.kind}s--{name.repo.replace('/', '--')}"


def _held_bytes(name: HubName) -> int:
    """Of the repository on this disk, unfinished files included."""
    num_bytes = 0
    for path in Path(_folder(name), "blobs").glob("*"):
        with suppress(OSError):  # it has its last name now
            num_bytes += path.stat().st_blocks * BLOCK_BYTES
    return num_bytes


@dataclass(slots=True)
class _Fetch:
    """One look at the hub for all names of a run file."""

    has_data: bool = True
    max_bytes: int | None = None
    say: Say = say_nothing
    doing: Say = say_nothing
    _progress: Callable[[], str] = lambda: "asking the hub"
    downloads: list[HubDownload] = field(default_factory=list[HubDownload])
    """That were left out or are done."""
    findings: list[Finding] = field(default_factory=list[Finding])
    silence: Exception | None = None
    """Why the hub does not answer."""

    def run(self, config: RunConfig) -> RunConfig:
        """In a thread, so that Ctrl-C waits for no answer."""
        work = begin_in_daemon_thread(lambda: with_named(config, self._pin), "hub")
        while wait((work,), LOOK_EVERY_S).not_done:
            self.doing(self._progress())
        return work.result()

    def _pin(self, text: str, meaning: Meaning, path: KeyPath) -> str | tuple[str, ...]:
        kind, key = KINDS.get(meaning), ".".join(path)
        if kind is None or not text.startswith(HUB) or (kind == "dataset" and not self.has_data):
            return text
        part = "".join(SLICE.findall(text))
        self._progress = lambda: f"{key}: asking the hub for {text}"
        try:
            name = HubName.of(kind, SLICE.sub("", text))
            names = self._fetch_model(name, key) if kind == "model" else self._fetch_data_set(name, key)
            if part and len(names) > 1:
                patterns = ", ".join(name.file for name in names)
                raise ConfigError(f"{key}: {text} is of several patterns: {patterns}", remedy=f"name one: {names[0]}")
        except MyxaError as error:
            self.findings.append(Finding(key, error))
            return text
        texts = tuple(f"{name}{part}" for name in names)
        if texts != (text,):
            self.say(f"{key}: {', '.join(texts)}")
        return texts[0] if len(texts) == 1 else texts

    def _fetch_model(self, name: HubName, key: str) -> tuple[HubName, ...]:
        folder = self._fetch_small(name, key, MODEL_FILES)
        name = replace(name, revision=folder.name)
        files = self._fetch_files(name, key, (*MODEL_FILES, WEIGHTS))
        if not any(file.endswith(WEIGHTS[1:]) for file in files or map(str, folder.iterdir())):
            listing = ", ".join(_listing(name, folder)[:SHOWN])
            raise ConfigError(
                f"{key}: {name} has no safetensors files: it holds {listing or 'nothing'}",
                remedy="name a repository or revision that has them; other formats can run code and are not read",
            )
        return (name,)

    def _fetch_data_set(self, name: HubName, key: str) -> tuple[HubName, ...]:
        folder = self._fetch_small(name, key, (CARD, ALWAYS))
        name = replace(name, revision=folder.name)
        patterns = (name.file,) if name.file else _patterns_of_split(name, key, folder)
        try:
            names = tuple(HubName.of("dataset", str(replace(name, parts=(), file=file))) for file in patterns)
        except ValueError:
            raise ConfigError(
                f"{key}: the card of {name} names files outside of it: {', '.join(map(repr, patterns))}",
                remedy="do not use this data set",
            ) from None
        # `**/` of a pattern of paths may be nothing; in one of texts, as the hub's, it holds a slash.
        if self._fetch_files(name, key, (*patterns, *(pattern.replace("**/", "") for pattern in patterns))) == ():
            raise ConfigError(f"{key}: {name} has no file {', '.join(patterns)}", remedy="look at its files on the hub")
        return names

    def _fetch_small(self, name: HubName, key: str, patterns: Sequence[str]) -> Path:
        """Fetch what is read before anything else is asked for. The folder of the commit."""
        if (missing := self._missing(name, key, patterns)[0]) > LOOK_BYTES:
            raise ConfigError(
                f"{key}: {name} has {missing / GIB:.1f} GiB of {', '.join(patterns)}, which should be small",
                remedy="do not use it, or fetch it yourself and name the folder or file",
            )
        return self._snapshot(name, key, patterns)

    def _fetch_files(self, name: HubName, key: str, patterns: Sequence[str]) -> tuple[str, ...] | None:
        """Fetch all files that are like the patterns, if there is room and they are not too large. Their names; None:
        the hub cannot be asked, and all that is known to be needed is there."""
        missing, names = self._missing(name, key, patterns)
        folder = Path(_cache())
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        planned = sum({other.name: other.num_bytes for other in self.downloads if other.name != str(name)}.values())
        self.downloads.append(HubDownload(key, str(name), missing, free, str(folder)))
        if missing + planned > free:
            raise ConfigError(
                f"{key}: {name} needs {(missing + planned) / GIB:.1f} GiB, and {folder} has {free / GIB:.1f} GiB",
                remedy="make room, or set HF_HOME to a folder on another disk",
            )
        if self.max_bytes is None or missing <= self.max_bytes:
            if missing:
                self.say(f"{key}: fetching {missing / GIB:.3f} GiB into {folder}")
                held = _held_bytes(name)
                self._progress = lambda: (
                    f"{key}: {max(0, _held_bytes(name) - held) / MIB:.3f} of {missing / MIB:.3f} MiB fetched of {name}"
                )
            self._snapshot(name, key, patterns)
            self.downloads[-1] = replace(self.downloads[-1], num_bytes=0)
        return names

    # -- the hub's own client

    def _snapshot(self, name: HubName, key: str, patterns: Sequence[str]) -> Path:
        """The folder of a commit, with all files that are like the patterns."""
        folder = Path(cast("str", self._ask(name, key, patterns)))
        if not COMMIT.fullmatch(folder.name):
            raise ConfigError(f"{key}: the hub answers with no commit: {folder.name!r}", remedy="check HF_ENDPOINT")
        return folder

    def _missing(self, name: HubName, key: str, patterns: Sequence[str]) -> tuple[int, tuple[str, ...] | None]:
        """Bytes that the cache lacks of the files that are like the patterns, and the names of all of these; 0 and None
        if the hub cannot be asked."""
        from huggingface_hub.file_download import DryRunFileInfo

        files = cast("list[DryRunFileInfo] | None", self._ask(name, key, patterns, dry_run=True))
        missing = sum(file.file_size or 0 for file in files or () if file.will_download)
        return missing, None if files is None else tuple(file.filename for file in files)

    def _ask(self, name: HubName, key: str, patterns: Sequence[str], *, dry_run: bool = False) -> object:
        """What `snapshot_download` returns, or what it fails with in words; None for a dry run that cannot be made.
        Once the hub did not answer, the cache alone is asked: each further name would wait as long."""
        from huggingface_hub import (
            constants,
            get_session,
            snapshot_download,  # pyright: ignore[reportUnknownVariableType]
        )
        from huggingface_hub.errors import DryRunError, HfHubHTTPError
        from huggingface_hub.utils import disable_progress_bars

        if dry_run and self.silence:
            return None
        hooks = get_session().event_hooks["request"]
        if _limit_time not in hooks:
            hooks.append(_limit_time)
        disable_progress_bars()  # `doing` says it
        constants.DOWNLOAD_CHUNK_SIZE = MIB  # is written at once: a slow download is seen to grow
        try:
            return snapshot_download(
                name.repo, repo_type=name.kind, revision=name.revision or None, allow_patterns=list(patterns),
                ignore_patterns=list(OTHER_WEIGHTS) if name.kind == "model" else None, dry_run=dry_run,
                local_files_only=self.silence is not None,
            )  # fmt: skip
        except DryRunError as error:
            cause = error.__cause__
            self.silence = cause if isinstance(cause, Exception) and not isinstance(cause, HfHubHTTPError) else None
            return None
        except Exception as error:  # noqa: BLE001 -- its HTTP, disk and transfer libraries have errors of their own
            error.__cause__ = error.__cause__ or self.silence
            cause, remedy = _explain(error, name)
            raise ConfigError(f"{key}: {name}: {cause}", remedy=remedy) from None


# -- the hub -----------------------------------------------------------------------------------------------------------


def _listing(name: HubName, folder: Path) -> list[str]:
    """Paths in the repository, or in its folder of the cache if the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return sorted(HfApi().list_repo_files(name.repo, revision=name.revision, repo_type=name.kind))
    except Exception:  # noqa: BLE001 -- as in `_ask`
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _limit_time(request: Any) -> None:
    """Give a request the time limits that it lacks: huggingface_hub asks for revisions without any."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        phase: HF_HUB_DOWNLOAD_TIMEOUT if value is None else value for phase, value in limits.items()
    }


def _without_secrets(text: str) -> str:
    """Addresses without user, password and signatures."""
    return re.sub(r"(https?://)(?:[^\s/@'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"\1\2", text)


def _explain(error: Exception, name: HubName) -> tuple[str, str]:
    """Cause and remedy."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo = f"{'data set' if name.kind == 'dataset' else 'model'} {name.repo}"
    slash = ", with %2F for a slash" if name.kind == "dataset" else ""
    both = f"or name a folder that exists: {name.repo} is none beside the run file (with --set: in this folder)"
    if isinstance(error, GatedRepoError):
        return f"the {repo} is gated", LOG_IN
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no {repo}, or it is private", f"check the name, {both}; a private one: {LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return f"the {repo} has no revision {name.revision}", f"name a branch, tag or commit of it{slash}"
    cause = error.__cause__ or error
    shown = _without_secrets(str(cause).splitlines()[0] if str(cause) else type(cause).__name__)
    if isinstance(error, LocalEntryNotFoundError):
        is_off = isinstance(cause, OfflineModeIsEnabled)
        verb = "answers" if isinstance(cause, HfHubHTTPError) else "does not answer:"
        why = "HF_HUB_OFFLINE is set" if is_off else f"{_without_secrets(ENDPOINT)} {verb} {shown}"
        return f"the {repo} is not whole in the cache, and {why}", f"fetch it where there is network, {both}"
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {shown}", "try again later: what is there stays; see status.huggingface.co"
    return f"cannot be fetched: {shown}", "try again: what is there stays; check the disk, HF_HOME and HF_ENDPOINT"


# -- splits of data sets -----------------------------------------------------------------------------------------------


def _patterns_of_split(name: HubName, key: str, folder: Path) -> tuple[str, ...]:
    """Patterns of the files of the split that is meant: as the data set's card says, or its only file."""
    splits = _splits_of_card(folder / CARD)
    if not splits:
        files = [file for file in _listing(name, folder) if DATA.search(file) and not NO_DATA.search(file)]
        if len(files) == 1 and not name.parts:
            return (glob.escape(files[0]),)
        raise ConfigError(
            f"{key}: the card of {name} names no splits; it holds {', '.join(files[:SHOWN]) or 'no JSONL or parquet'}",
            remedy=f"name a file or pattern, {replace(name, parts=(), file=files[0] if files else '*.jsonl')}, or the "
            f"hub's own copy: {name.repo}@refs/convert/parquet/default/train/*.parquet",
        )
    hits = [split for split in splits if name.parts in ((), split, split[:1], split[1:])]
    if len(hits) == 1:
        return splits[hits[0]]
    has_configs = len({config for config, _ in splits}) > 1
    names = [":".join(split if has_configs else split[1:]) for split in splits]
    trouble = "could be several" if hits else f"is none of its splits; {suggest(':'.join(name.parts), names)}"
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    raise ConfigError(f"{key}: {name} {trouble}: {shown}", remedy=f"say which: {name.repo}:{names[0]}")


class _Files(msgspec.Struct, frozen=True):
    split: str = "train"
    path: str | tuple[str, ...] = ()


class _Part(msgspec.Struct, frozen=True):
    config_name: str = "default"
    data_files: str | tuple[str | _Files, ...] | dict[str, str | tuple[str, ...]] = ()


class _Card(msgspec.Struct, frozen=True):
    configs: tuple[_Part, ...] = ()


def _splits_of_card(card: Path) -> dict[Split, tuple[str, ...]]:
    """Patterns of files by what the `configs` of a data set's card say; none where they are not as the hub has them."""
    from huggingface_hub import metadata_load  # pyright: ignore[reportUnknownVariableType]

    try:
        is_read = card.stat().st_size <= MAX_CARD_BYTES
        metadata = cast("dict[str, Any]", metadata_load(card) or {}) if is_read else {}
        pieces = json.JSONEncoder().iterencode(metadata.get("configs"))
        if next(islice(pieces, MAX_CARD_PIECES, None), None) is not None:  # aliases of aliases are billions of files
            return {}
        parts = msgspec.convert(metadata, _Card).configs
    except Exception:  # noqa: BLE001 -- the YAML reader has its own errors; then files are named
        return {}
    splits: dict[Split, list[str]] = {}
    for part in parts:
        files = (part.data_files,) if isinstance(part.data_files, str) else part.data_files
        rows = files.items() if isinstance(files, dict) else [
            (file.split, file.path) if isinstance(file, _Files) else ("train", file) for file in files
        ]  # fmt: skip
        for split, path in rows:
            splits.setdefault((part.config_name, split), []).extend((path,) if isinstance(path, str) else path)
    return {split: tuple(patterns) for split, patterns in splits.items() if patterns}
