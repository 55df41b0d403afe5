"""A run that does not come to its end: who waits for whom, who holds which memory, where its processes are, and the
last lines of all of its logs.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

LAST_LINES = 12
LONGEST_LINE, LONGEST_END, MOST_CHARACTERS = 300, 1500, 14_000
"""Of a line, of the end of one log, of all of them together."""
NOISE = re.compile(r'"GET /(model_info|health|server_info)\S* HTTP')
"""Somebody looks whether a server is there."""
FIRST = ("launcher", "memory", "trainer", "rollout", "coordinator")
"""Whose logs are told first: what is too much is cut off at the end."""
QUESTIONS = (("why",), ("mem",), ("stack", "all"))
TOLD = 2500
"""Characters of an answer; all of it goes into a log beside the run's."""
ANSWER_S = 10.0


def ends_of_logs(log: Path, run_dir: Path | None) -> str:
    """The last lines of the launcher's output and of every actor's and server's log."""
    found = list((run_dir / "logs").rglob("*.log")) if run_dir is not None else []
    parts: list[str] = []
    for path in (log, *sorted(found, key=_place_of)):
        if path.is_symlink():  # to the newest attempt
            continue
        with contextlib.suppress(OSError):
            said = path.read_text(encoding="utf-8", errors="replace").splitlines()
            last = [line[:LONGEST_LINE] for line in said if not NOISE.search(line)][-LAST_LINES:]
            parts.append(f"--- {path.name}\n" + "\n".join(last)[-LONGEST_END:])
    return "\n".join(parts)[:MOST_CHARACTERS]


def _place_of(path: Path) -> tuple[int, str]:
    role = path.name.split(".", 1)[0]
    return (FIRST.index(role) if role in FIRST else len(FIRST)), path.name


def look(run_dir: Path | None) -> str:
    """What a run that still goes on says of itself, through its socket, within `ANSWER_S`. The whole answers, stacks
    among them, go into logs of the run directory."""
    if run_dir is None:
        return "it has no run directory yet"
    asked = [
        subprocess.Popen(
            [sys.executable, "-m", "myxa.launch", *words, "--run", str(run_dir)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for words in QUESTIONS
    ]  # fmt: skip
    give_up_at = time.monotonic() + ANSWER_S
    parts: list[str] = []
    for words, process in zip(QUESTIONS, asked, strict=True):
        try:
            said, _ = process.communicate(timeout=max(give_up_at - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said = b"(no answer in time) " + said
        text = said.decode(errors="replace").rstrip()
        file = run_dir / f"look.{words[0]}.log"
        file.write_text(text + "\n", encoding="utf-8")
        parts.append(f"--- myxa {' '.join(words)}\n" + (f"in {file.name}" if words[0] == "stack" else text[-TOLD:]))
    return "\n".join(parts)


def stands_still(run_dir: Path | None, still_s: float) -> bool:
    """Whether a run that is past its start has told nothing for so long: a change of hands alone is told twice."""
    events = None if run_dir is None else run_dir / "events.jsonl"
    with contextlib.suppress(OSError):
        if events is not None and time.time() - events.stat().st_mtime > still_s:
            return "-> running" in events.read_text(encoding="utf-8", errors="replace")
    return False
