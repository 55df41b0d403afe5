"""The documentation as a whole: its links lead somewhere, its files exist, its reading order is complete, it is short."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from myxa.core.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "examples"
EXAMPLE_PAGES = sorted(EXAMPLES.rglob("README.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:core|transport|memory|algos|actors|launch|tests|bench|examples)/[\w./-]*[\w-](?:\.\w+|/))`")
TEST = re.compile(r"`(?:tests/)?(\w+/test_\w+\.py)(?:::(\w+))?`")
MOST_LINES = 3500


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLE_PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(without_code(path.read_text())):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(other.read_text()), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    missing = [
        name
        for name in FILE.findall(path.read_text())
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "tests"))
    ]
    assert missing == []
    for file, test in TEST.findall(path.read_text()):
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_every_example_has_a_page_that_the_index_lists() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("__")}
    listed = LINK.findall((EXAMPLES / "README.md").read_text().partition("## Recipes")[0])
    assert {target.removesuffix("/README.md") for target in listed if "/" in target} == folders - {"recipes"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {target for target in listed if "/" not in target}


@pytest.mark.parametrize(
    "path",
    sorted(EXAMPLES.glob("*/*.toml")),
    ids=lambda path: str(path.relative_to(EXAMPLES)),
)
def test_run_files_of_examples_are_valid(path: Path) -> None:
    RunConfig.model_validate(tomllib.loads(path.read_text()))


def test_every_page_is_in_the_reading_order() -> None:
    index = (ROOT / "docs" / "README.md").read_text().partition("## Glossary")[0]
    listed = {target for target in LINK.findall(index) if target.endswith(".md")}
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} | {"../README.md"}


def test_the_glossary_is_in_order() -> None:
    rows = (ROOT / "docs" / "README.md").read_text().partition("## Glossary")[2].splitlines()
    words = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")][1:]
    assert words == sorted(words)


def test_all_pages_together_are_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PAGES[1:]) <= MOST_LINES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pieces_of_run_files_are_valid(path: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL):
        values = tomllib.loads(block)
        values.setdefault("model", {"path": "model"})
        if "sources" not in values.setdefault("data", {}):
            values["data"].setdefault("train", "train.jsonl")
        RunConfig.model_validate(values)
