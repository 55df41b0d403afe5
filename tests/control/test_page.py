"""docs/control.md: its examples are run against a live run, in their order, and do what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.control.live import live_run

from myxa.launch.control.dispatcher import all_verbs

PAGE = Path(__file__).parents[2] / "docs" / "control.md"
BLOCK = re.compile(r"^```console(?: exit=(?P<exit>\d+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
SHELL = set("$|;<>")
"""What a shell has a part in; all other examples are commands alone."""
WITHOUT_COMMAND = {"status", "verbs", "logs-follow", "facts", "dumps"}
"""Verbs for programs; `get`, `config`, ... are commands by their own name."""


def examples() -> list[tuple[str, int, list[str]]]:
    """(command, exit status, lines of its output) of the whole page."""
    found: list[tuple[str, int, list[str]]] = []
    for block in BLOCK.finditer(PAGE.read_text()):
        for line in block["body"].splitlines():
            if line.startswith("$ "):
                found.append((line[2:], int(block["exit"] or 0), []))
            else:
                found[-1][2].append(line)
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What a line of the page stands for: any numbers, any blanks, "..." for anything."""
    parts: list[str] = []
    for word in re.split(r"(\.\.\.|\s+)", line.strip()):
        if word == "...":
            parts.append(".*")
        elif word.isspace():
            parts.append(r"\s+")
        else:
            at = 0
            for number in NUMBER.finditer(word):
                parts += [re.escape(word[at : number.start()]), r"-?[\d.]+(?:e[+-]?\d+)?"]
                at = number.end()
            parts.append(re.escape(word[at:]))
    return re.compile(r"\s*" + "".join(parts).replace(r".*\s+", r".*").replace(r"\s+.*", r".*") + r"\s*")


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """Lines of the page that the output does not have, in order; a line that is only "..." may stand for none."""
    lines = iter(printed.splitlines())
    return [
        line for line in shown if line.strip() not in ("...", "") and not any(pattern(line).fullmatch(p) for p in lines)
    ]


def test_lines_are_compared_as_the_page_says():
    assert missing_lines(["lr  0.1 -> 0.2  trainer/0, at step 12"], "lr  0.001 -> 1e-05  trainer/0, at step 7") == []
    assert missing_lines(["a ... b 1", "...", "c"], "x\na y z b 22\nmore\nc") == []
    assert missing_lines(["a", "b"], "b\na") == ["b"]
    assert missing_lines(["at once"], "at step 1") == ["at once"]


def test_every_verb_has_an_example():
    commands = " ".join(command for command, _, _ in examples())
    for verb in all_verbs():
        name = verb.name.partition("-")[0]
        assert f"myxa {name}" in commands or verb.name in WITHOUT_COMMAND, f"{verb.name}: no example in docs/control.md"
        assert f"`{verb.name}`" in PAGE.read_text() or f"myxa {name}" in commands


@pytest.mark.timeout(900)
def test_every_example_does_what_the_page_shows(tmp_path: Path):
    with live_run(tmp_path, "roles.rollout.count=2") as live:
        wrong: list[str] = []
        for command, status, shown in examples():
            done = live.shell(command) if SHELL & set(command) else live.myxa(*shlex.split(command)[1:])
            printed = done.stdout + done.stderr
            if done.returncode != status or missing_lines(shown, printed):
                wrong.append(f"$ {command}\n{printed}-> {done.returncode}; not there: {missing_lines(shown, printed)}")
        assert not wrong, "\n\n".join(wrong)
        assert live.launcher.wait(90) == 0
