"""Every command, in the order in which `myxa --help` lists them. One module each, with `add(verbs)`."""

from __future__ import annotations

from importlib import import_module

from .output import Verbs

MODULES = (
    "up", "launch", "demo", "plan", "doctor", "convert", "engine",
    "ps", "top", "dashboard", "why", "suggest", "watch",
    "get", "set", "explain", "apply", "undo", "history", "config",
    "pause", "resume", "fork", "ckpt",
    "scale", "drain", "restart", "kill", "chaos", "logs", "stack", "profile", "trace", "grafana", "dump", "samples",
    "mem", "report", "control",
)  # fmt: skip


def add_commands(verbs: Verbs) -> None:
    """Add every command to the parser."""
    for name in MODULES:
        import_module(f".{name}", __package__).add(verbs)
