"""What stands beside the code names what is there: extras, paths, commands, and no machine of ours."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = ("bug", "feature", "question")
NEW = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "CITATION.cff", "Dockerfile", "MANIFEST.in",
       ".dockerignore", ".pre-commit-config.yaml")  # fmt: skip
EXTRAS = re.compile(r"(?:myxa|whl\)|['\"\s]\.)\[([a-z0-9]+(?:,[a-z0-9]+)*)\]")
"""`myxa[code]`, `pip install -e '.[gpu,megatron]'`, and the wheels of the Dockerfile."""
KINDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


def pages() -> list[Path]:
    folders = ("docs", "examples", "core", "transport", "memory", "algos", "actors", "launch")
    found = [path for name in folders for kind in ("*.md", "*.py") for path in (ROOT / name).rglob(kind)]
    return [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "CONTRIBUTING.md", *found]


def test_extras_that_are_named_anywhere_are_there():
    named = {
        (extra, path.name) for path in pages() for one in EXTRAS.findall(path.read_text()) for extra in one.split(",")
    }
    assert {("megatron", "Dockerfile"), ("cpu", "Dockerfile"), ("code", "rewards-and-data.md")} <= named
    assert {extra for extra, _ in named} <= set(PYPROJECT["project"]["optional-dependencies"]), named


def test_the_dockerfile_copies_what_is_there_and_sends_all_that_the_wheel_needs():
    stages, sources = set[str](), list[str]()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        word, *rest = line.split() or [""]
        if word == "FROM":
            stages.add(rest[-1])
        elif word == "COPY":
            origin = [item for item in rest if item.startswith("--from=")]
            assert all(item.removeprefix("--from=") in stages for item in origin), line
            sources += [] if origin else rest[:-1]
    assert {"cpu", "cuda"} <= stages
    assert all((ROOT / source).exists() for source in sources), sources
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    floors = {name.split(".")[1] for name in PYPROJECT["tool"]["setuptools"]["packages"] if "." in name}
    assert sent == floors | {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "pyproject.toml",
        "constraints.txt",
        "LICENSE",
        "README.md",
    }


def test_hooks_run_programs_of_the_environment_only():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    for hook in repos[0]["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].split()[0] in (".venv/bin/ruff", ".venv/bin/lint-imports", ".venv/bin/python")


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_issues_are_forms(name: str):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in form["body"]} <= KINDS
    assert all(item["id"] and item["attributes"]["label"] for item in fields)
    assert len({item["id"] for item in fields}) == len(fields)
    assert any(item["validations"]["required"] for item in fields)


@pytest.mark.parametrize("name", [name for name in NEW if name.endswith(".md")])
def test_links_and_make_targets_are_there(name: str):
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z]+(?:-[a-z]+)*)", text, re.M)) <= targets


def test_citation_has_what_its_format_asks():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == PYPROJECT["project"]["license"]


@pytest.mark.parametrize("name", [*NEW, *(f".github/ISSUE_TEMPLATE/{form}.yml" for form in (*FORMS, "config"))])
def test_no_address_is_made_up(name: str):
    assert not re.findall(r"https?://\S+|\S+@\S+\.\w+", (ROOT / name).read_text())
