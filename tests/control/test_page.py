"""What is made from the verbs' declarations: the table in docs/control.md and the completion; handlers for all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from myxa.launch.cli import main, make_parser
from myxa.launch.control.handlers import HANDLERS
from myxa.launch.control.verbs import ALL, DASHBOARD, Verb, describe

PAGE = Path(__file__).parents[2] / "docs" / "control.md"
HEAD, END = "<!-- verbs -->\n", "<!-- end -->"
REMEDY = "update it: python -m tests.control.test_page"


def table() -> str:
    """Markdown."""
    lines = ["| verb | effect | arguments | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_row(verb) for verb in ALL)]) + "\n"


def _row(verb: Verb[Any]) -> str:
    about = describe(verb)
    names = [f"`{name}`" if name in about["required"] else name for name in about["arguments"]]
    return f"| `{verb.name}` | {verb.effect} | {', '.join(names)} | {verb.help} |"


def renewed(page: str) -> str:
    before, _, rest = page.partition(HEAD)
    _, end, after = rest.partition(END)
    assert end, f"docs/control.md lacks {HEAD!r} and {END!r}"
    return before + HEAD + table() + END + after


def test_the_table_of_the_page_is_current() -> None:
    assert renewed(PAGE.read_text()) == PAGE.read_text(), REMEDY


def test_every_verb_has_a_handler_and_every_argument_a_help() -> None:
    assert {*HANDLERS, DASHBOARD} == set(ALL)
    assert len({verb.name for verb in ALL}) == len(ALL)
    for verb in ALL:
        assert verb.help and all(each.get("description") for each in describe(verb)["arguments"].values()), verb.name


def test_who_asks_is_no_argument_of_a_caller() -> None:
    (about,) = [describe(verb) for verb in ALL if verb.name == "set"]
    assert len(about["arguments"]) == 8 and "who" not in about["arguments"]
    assert about["required"] == ["values"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [("myxa se", "set"), ("myxa set --dr", "--dry-run"), ("myxa logs --fo", "--follow"), ("myxa whe", "where")],
)
def test_bash_completes_commands_and_flags(words: str, offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    typed = words.split()
    line = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _myxa myxa {typed[-1]}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out + line], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == [offered]


def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in make_parser().commands:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and f"usage: myxa {name}" in capsys.readouterr().out


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
