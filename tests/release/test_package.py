"""What is released: the sdist holds the tree, the wheel that is built from it holds the package, and a new environment
with that wheel starts `myxa demo` in an empty folder. (`make package` adds twine's checks.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from tests.harness.waiting import wait_until

from myxa import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("core", "transport", "memory", "algos", "actors", "launch", "__init__.py", "__main__.py", "py.typed")
LEFT = re.compile(r"(^|/)(__pycache__|\.git|\.ns|\.(?!ci|github)[\w.-]+|build|dist|runs|[\w.-]+\.egg-info)/")
"""Folders of a tree that are not part of it."""
MADE = re.compile(r"PKG-INFO|setup\.cfg|myxa\.egg-info/.*")
"""Of an sdist, by setuptools."""
NAMES = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    ".github/ISSUE_TEMPLATE/bug.yml",
    "docs/tutorial.md",
    "Dockerfile",
)


def files_of_the_tree() -> set[str]:
    """Those that git knows; without git (an unpacked sdist) all but what setuptools and tests leave. Not `.ns`, whose
    links serve editors in a clone."""
    asked = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
        names = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    else:
        names = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()}
    return {name for name in names if not LEFT.search(name) and not MADE.fullmatch(name)}


def build(kind: str, source: Path, out: Path) -> Path:
    """`kind`: wheel or sdist. The file that setuptools made of the tree at `source`, which it may litter."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    command = [sys.executable, "-c", code]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=110, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    for name in files_of_the_tree():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    return build("sdist", folder / "source", folder / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, as installers do."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / f"myxa-{__version__}", folder / "out")


def test_the_sdist_holds_the_tree(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if not MADE.fullmatch(name)}
    assert names == files_of_the_tree()
    assert names >= set(NAMES)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"myxa/{name}" for name in files_of_the_tree() if name.split("/")[0] in PACKAGE}


def test_one_version_is_said_once(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    assert Parser().parsestr(archive.read(name).decode())["Version"] == __version__
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] in (__version__, "Unreleased")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a new environment with the wheel. Other packages are this environment's, so that the
    test needs no network."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, timeout=100)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    return python.parent


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def said(folder: Path, *words: str) -> str:
    asked = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    return asked.stdout.strip()


def test_from_an_empty_folder_the_command_and_the_module_are_the_wheels(installed: Path, tmp_path: Path):
    python, myxa = str(installed / "python"), str(installed / "myxa")
    where = Path(said(tmp_path, python, "-c", "import myxa; print(myxa.__file__)"))
    assert where.is_relative_to(installed.parent)
    assert said(tmp_path, myxa, "--version") == f"myxa {__version__}"
    assert said(tmp_path, python, "-m", "myxa", "--version") == f"myxa {__version__}"
    assert "rollout.n " in said(tmp_path, myxa, "migrate", "verl")
    assert not list(tmp_path.iterdir())


def test_from_an_empty_folder_the_demo_of_the_wheel_trains_and_a_stop_in_its_first_stage_ends_it(
    installed: Path, tmp_path: Path
):
    command = [str(installed / "myxa"), "demo", "--dir", "demo"]
    with (tmp_path / "printed").open("w+") as printed:
        demo = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=printed, stderr=printed)
        try:
            wait_until(lambda: list(tmp_path.glob("demo/sft-*/metrics.jsonl")) or demo.poll() is not None, "steps")
            demo.send_signal(signal.SIGTERM)
            status = demo.wait(60)
        finally:
            demo.kill()
            demo.wait(10)
        printed.seek(0)
        assert status == 0, printed.read()
    (report,) = tmp_path.glob("demo/sft-*/report.html")
    assert "train/loss" in report.read_text()
    assert not list(tmp_path.glob("demo/grpo-*")), "the second stage"
