"""Run by the interpreter that has SGLang: prints which arguments its server takes, as one JSON line after a mark.

    python server_probe.py <cache folder>

Uses the standard library and SGLang only: the interpreter need not have myxa. Importing SGLang takes ten seconds or
more, so the result is cached per version and place of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
from importlib import metadata
from pathlib import Path

MARK = "myxa-sglang-schema:"
IGNORED = ("_HelpAction", "DeprecatedAction")
"""Actions of arguments that do nothing to the server."""


def find(folder: Path) -> str:
    """The JSON text, from the folder if this very package was looked at before."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        return json.dumps({"missing": "sglang"})
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return look("")  # not installed, only found: nothing says when it changes
    name = hashlib.sha256(f"{version} {spec.origin} {sys.version}".encode()).hexdigest()[:16]
    path = folder / f"sglang-{version}-{name}.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = look(version)
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(found, encoding="utf-8")
    draft.replace(path)
    return found


def look(version: str) -> str:
    server_args = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    options = {}
    for action in parser._actions:
        kind = type(action).__name__
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if not flags or kind in IGNORED:
            continue
        # What is on its way out still works, under its old name; it may store into a field that has its own argument.
        name = flags[0][2:].replace("-", "_") if "Deprecated" in kind else action.dest
        options[name] = {
            "flags": flags,
            "kind": kind.strip("_"),
            "type": getattr(action.type, "__name__", "") if action.type else "str",
            "nargs": "" if action.nargs is None else str(action.nargs),
            "choices": [str(choice) for choice in action.choices or ()],
        }
    return json.dumps(
        {"version": version or getattr(sys.modules["sglang"], "__version__", "unknown"), "options": options}
    )


if __name__ == "__main__":
    here = Path(__file__).resolve().parent  # its modules must not shadow others
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    sys.stdout.write(f"{MARK}{find(Path(sys.argv[1]))}\n")
    sys.stdout.flush()
    os._exit(0)  # SGLang's imports leave threads behind
