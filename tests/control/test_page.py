"""What is made from the verbs' declarations: the table in docs/control.md and the completion; handlers for all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.launch.cli import main, make_parser
from myxa.launch.commands.knobs import declared
from myxa.launch.control.handlers import HANDLERS
from myxa.launch.verbs import ALL, DASHBOARD, Verb, describe

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


OFFERED = {
    "se": "set", "whe": "where", "set --dr": "--dry-run", "logs --fo": "--follow", "migrate --he": "--help", "migrate sl": "slime",
    "plan --set optimizer.weight_d": "optimizer.weight_decay=", "up --set models": "", "history weight_d": "",
    "set weight_d": "weight_decay", "get weight_d": "weight_decay",
}  # fmt: skip
"""What is typed -> all that a shell may offer."""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shell == "zsh":
        script = f"autoload -U compinit; compinit -D -u; {script}setopt ksharrays shwordsplit\n"
    for words in OFFERED:
        typed = words.split()
        call = f"COMP_WORDS=(myxa {words}); COMP_CWORD={len(typed)}; _myxa myxa {typed[-1]}; echo ${{COMPREPLY[@]}}"
        script += f"echo (complete -C 'myxa {words}')\n" if shell == "fish" else f"{call}\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    plain = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
    done = subprocess.run(
        [found, plain, "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    for (words, offered), line in zip(OFFERED.items(), done.stdout.splitlines(), strict=True):
        # zsh drops by itself what does not begin so
        assert [word for word in line.split() if word.startswith(words.split()[-1])] == offered.split(), words


def test_keys_and_knobs_to_complete_are_those_declared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "keys"]) == 0
    keys = capsys.readouterr().out.split()
    assert {"model.path=", "optimizer.lr=", "roles.trainer.count="} <= set(keys)
    assert len(keys) == len(set(keys)) > 200
    assert main(["completion", "knobs"]) == 0
    assert capsys.readouterr().out.split() == [one.name for one in declared()]


def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    for name in parser.commands:
        with pytest.raises(SystemExit) as ended:
            parser.parse_known_args([name, "--help"])
        assert ended.value.code == 0 and f"usage: myxa {name}" in capsys.readouterr().out


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
