"""The tables of tests/error_cases.md: inputs, and the messages that they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = (Path(__file__).parents[1] / "error_cases.md").read_text()


class Case(NamedTuple):
    """A row of a table."""

    place: str
    inputs: tuple[str, ...]
    message: str
    code: int


def section(title: str) -> str:
    found = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"tests/error_cases.md has no section {title}"
    return found


def block(title: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", section(title), re.DOTALL)
    assert found, f"no {language} block under {title}"
    return found[1]


def cases(title: str) -> list[Case]:
    found: list[Case] = []
    for line in section(title).splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[3].isdecimal():
            spans = tuple(one or other for one, other in re.findall(r"`` (.*?) ``|`([^`]*)`", cells[1]))
            message = re.fullmatch(r"`` (.*) ``|`([^`]*)`", cells[2])
            assert message, f"the message of {line} is not one code span"
            found.append(Case(cells[0], spans, message[1] or message[2], int(cells[3])))
    assert len(found) >= 8, f"only {len(found)} rows under {title}"
    return found
