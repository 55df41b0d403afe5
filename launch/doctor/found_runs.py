"""Runs and servers of this user on this host, found by what they left: runtime folders, workers' descriptions, command
lines. Looks only; nothing is ended here, and nothing is told by its name alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from ...core.errors import LaunchError
from ..child_env import SPEC_VARIABLE, WORKER_MODULE
from ..control.client import ControlNote
from ..runtime_dir import PREFIX, short_base
from ..worker_spec import WorkerSpec, read_spec
from .machine_facts import FoundRun, Server

SERVER_MODULE = "sglang.launch_server"
HOST_FLAG, KEY_FLAGS = "--host", ("--api-key", "--admin-api-key", "--config")
"""myxa's own servers get their keys by a file, `--config`."""


def find_runs() -> tuple[FoundRun, ...]:
    """Every run of this user that has a folder or a process here."""
    workers, guarded = list(_workers()), _guarded_folders()
    found: dict[str, FoundRun] = {}
    for folder in {*_folders(), *(folder for _, folder, _ in workers)}:
        note = ControlNote.load(folder)
        mine = [(pid, spec) for pid, folder_of, spec in workers if folder_of == folder]
        launcher = note.pid if note is not None else mine[0][1].launcher_pid if mine else 0
        run_dir = note.run_dir if note is not None else mine[0][1].run_dir if mine else ""
        is_alive = str(folder) in guarded or (launcher > 0 and psutil.pid_exists(launcher))
        found[str(folder)] = FoundRun(run_dir, str(folder), launcher, is_alive, tuple(pid for pid, _ in mine))
    return tuple(found[name] for name in sorted(found))


def _guarded_folders() -> set[str]:
    """Runtime folders whose launcher lives: a shell waits for its end, to remove the folder then."""
    found: set[str] = set()
    for words in _command_lines().values():
        if words[:2] == ["/bin/sh", "-c"] and Path(words[-1]).name.startswith(PREFIX):
            found.add(words[-1])
    return found


def _command_lines() -> dict[int, list[str]]:
    """Of every process of this user."""
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                found[process.pid] = process.cmdline()
        except psutil.Error:
            continue
    return found


def _folders() -> Iterator[Path]:
    try:
        base = Path(short_base())
        entries = sorted(base.glob(f"{PREFIX}*"))
    except (LaunchError, OSError):
        return
    for entry in entries:
        try:
            facts = entry.lstat()
        except OSError:
            continue
        is_socket_folder = (entry / "rdzv.json").exists() or ControlNote.load(entry) is not None
        if facts.st_uid == os.getuid() and entry.is_dir() and is_socket_folder:
            yield entry


def _workers() -> Iterator[tuple[int, Path, WorkerSpec]]:
    """Process id, runtime folder and description of every actor of this user."""
    for pid, words in _command_lines().items():
        if WORKER_MODULE not in words:
            continue
        try:
            path = psutil.Process(pid).environ().get(SPEC_VARIABLE, "")
            yield pid, Path(path).parent, read_spec(path)
        except (psutil.Error, LaunchError):
            continue


def find_servers() -> tuple[Server, ...]:
    """SGLang servers of this user: what they listen on, and whether they ask for a key."""
    lines = _command_lines().items()
    return tuple(server_of(pid, words) for pid, words in lines if SERVER_MODULE in words)


def server_of(pid: int, words: Sequence[str]) -> Server:
    """From a command line with `--flag value` or `--flag=value`."""
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    host = next((flat[at + 1] for at, word in enumerate(flat[:-1]) if word == HOST_FLAG), "127.0.0.1")
    return Server(pid, host, any(flag in flat for flag in KEY_FLAGS))
