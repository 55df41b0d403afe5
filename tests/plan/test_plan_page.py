"""docs/plan.md shows what the commands print: its run file is planned, its figures are computed, its machine is judged.

`python -m tests.plan.test_plan_page` writes the samples.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.doctor.test_doctor import GOOD
from tests.plan.memory_cases import CASES, NOT_BY_TORCH, SHAPES, measured, run

from myxa.launch.checks.all_checks import findings_text, judge
from myxa.launch.checks.memory_estimate import trainer_memory
from myxa.launch.cli import main
from myxa.launch.memory_part import GIB, total

FILE = Path(__file__).parents[2] / "docs" / "plan.md"
NOT_SHOWN = ("== batch", "== staleness")

TRAPPED = replace(
    GOOD,
    gpus=replace(GOOD.gpus, driver="570.86.15"),
    shm_bytes=64 << 20,
    addresses=("127.0.1.1",),
    folder="/shared/runs",
    file_system="nfs4",
)


def block(page: str, after: str) -> str:
    return page.partition(f"{after}\n")[2].partition("```")[0]


def planned(page: str) -> str:
    """What the page's command says of the page's run file."""
    command = re.search(r"^\$ myxa (plan run\.toml .*)$", page, re.MULTILINE)
    assert command
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "run.toml").write_text(block(page, "```toml"))
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(dict(SHAPES["1.7B"].source)))
        (folder / "data").mkdir()
        (folder / "data/train.jsonl").write_text('{"prompt": "2+2", "label": "4"}\n' * 7473)
        before = Path.cwd()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert main(command[1].split()) == 0
        finally:
            os.chdir(before)
        return shown(said.getvalue().replace(f"{folder}/", ""))


def shown(said: str) -> str:
    """The parts of a plan that the page shows; three dots stand for the others."""
    parts = re.split(r"(?m)^(?=== )", said)
    kept = [part for part in parts if not part.startswith(NOT_SHOWN) and not re.match(r"== \d+ warnings", part)]
    return "\n".join([*(part.rstrip("\n") + "\n" for part in kept if part.strip()), "...\n"])


def trouble(said: str) -> str:
    """The lines about what is not in order; three dots stand for the others."""
    lines = said.splitlines()
    kept = [line for line in lines if not line.startswith("ok ")]
    return "\n".join([*kept[:-1], "...", kept[-1]]) + "\n"


def figures() -> str:
    """Rows of the table of measured and planned memory."""
    lines: list[str] = []
    for row, kind, shape, ranks in CASES:
        parts = trainer_memory(run(kind, ranks), SHAPES[shape], ranks)
        said = total(part for part in parts if part.name not in NOT_BY_TORCH) / GIB
        lines.append(f"| {row.strip(' |')} | {measured(row)} | {said:.1f} |\n")
    return "".join(lines)


def renewed(page: str) -> str:
    """The page with what is said today."""
    plan = re.search(r"^\$ myxa plan run\.toml .*\n", page, re.MULTILINE)
    assert plan
    for start, end, text in (
        (plan[0], "```", planned(page)),
        ("| run | measured GiB | planned GiB |\n|---|---|---|\n", "\nA test holds", figures()),
        ("$ myxa doctor\n", "```", trouble(findings_text(judge(TRAPPED)))),
    ):
        head, found, rest = page.partition(start)
        assert found, start
        page = head + found + text + end + rest.partition(end)[2]
    return page


def test_the_page_shows_what_is_said() -> None:
    page = FILE.read_text()
    now = renewed(page)
    assert page == now, "update it: python -m tests.plan.test_plan_page"


if __name__ == "__main__":
    FILE.write_text(renewed(FILE.read_text()))
