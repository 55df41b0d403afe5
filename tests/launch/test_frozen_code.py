"""Files that the algorithm is made of are copied into the run's folder, with what they import from beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.user_code.functions import REWARD_POST_PROCESS, load_function
from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError, LaunchError
from myxa.launch.frozen_code import freeze, post_run
from myxa.launch.run_dir import RunDir

RAW: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def config_of(**algo: str) -> RunConfig:
    return RunConfig.model_validate({**RAW, "algo": algo})


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    files = {
        "mine.py": "import json, near\nfrom pack.inner import x\ndef f(): import late\n",
        "near.py": "import far, mine\n", "far.py": "", "late.py": "", "unused.py": "", "pack/__init__.py": "",
        "pack/inner.py": "from . import other\n", "pack/other.py": "import outer\n", "outer.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "mine.py"


def test_a_file_goes_with_all_that_it_needs_from_beside_it(tmp_path: Path, mine: Path) -> None:
    run_dir = tmp_path / "run"
    frozen = freeze(config_of(loss_fn=f"{mine}:f", advantage_fn=f"{mine}:g", reward_post_process="json:dumps"), run_dir)
    (folder,) = {name.split("/")[1] for name in frozen.files}
    names = {name.removeprefix(f"code/{folder}/") for name in frozen.files}
    assert names == {
        "mine.py", "near.py", "far.py", "late.py", "outer.py", "pack/__init__.py", "pack/inner.py", "pack/other.py",
    }  # fmt: skip
    algo = frozen.config.algo
    assert algo.loss_fn == f"{run_dir}/code/{folder}/mine.py:f"
    assert algo.advantage_fn == f"{run_dir}/code/{folder}/mine.py:g"
    assert algo.reward_post_process == "json:dumps"
    post_run(RunDir(run_dir), frozen.text, frozen.files)
    assert Path(algo.loss_fn.removesuffix(":f")).read_text() == mine.read_text()
    assert load_config(run_dir / "config.toml").algo == algo
    run_dir.rename(tmp_path / "moved")
    assert load_config(tmp_path / "moved" / "config.toml").algo.loss_fn == f"{tmp_path}/moved/code/{folder}/mine.py:f"


def test_a_copy_of_this_run_stays_as_it_is_and_that_of_another_run_is_copied(tmp_path: Path, mine: Path) -> None:
    run_dir, child = tmp_path / "run", tmp_path / "child"
    frozen = freeze(config_of(loss_fn=f"{mine}:f"), run_dir)
    post_run(RunDir(run_dir), frozen.text, frozen.files)
    copy = Path(frozen.config.algo.loss_fn.removesuffix(":f"))
    copy.write_text("# mended here\n" + copy.read_text())
    again = freeze(frozen.config, run_dir)
    assert again.config == frozen.config
    assert again.files.keys() == frozen.files.keys()
    post_run(RunDir(run_dir), again.text, again.files)
    assert copy.read_text().startswith("# mended here")
    forked = freeze(frozen.config, child)
    assert forked.config.algo.loss_fn.startswith(f"{child}/code/")
    assert copy.parent.name not in forked.config.algo.loss_fn, "the name says what is in it"
    assert freeze(config_of(loss_fn=f"{mine}:f"), child).config.algo.loss_fn.endswith(f"{copy.parent.name}/mine.py:f")


@pytest.fixture
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in the folder that the run is started from, whose modules Python looks at first."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("as_it_was")
def test_a_copy_imports_the_copies_beside_it_also_where_the_run_was_started(tmp_path: Path) -> None:
    original = tmp_path / "nearby_fz.py"
    original.write_text("X = 1\n")
    (tmp_path / "mine.py").write_text(
        "import json, nearby_fz\ndef f(groups):\n    import late_fz\n    return nearby_fz.X, late_fz.X, json.__file__\n"
    )
    (tmp_path / "late_fz.py").write_text("X = 1\n")
    (tmp_path / "json").mkdir()  # of data
    frozen = freeze(config_of(reward_post_process="mine.py:f"), tmp_path / "run")
    post_run(RunDir(tmp_path / "run"), frozen.text, frozen.files)
    original.write_text("X = 2\n")
    (tmp_path / "late_fz.py").write_text("X = 2\n")
    found = load_function(frozen.config.algo.reward_post_process, REWARD_POST_PROCESS).fn(())
    assert found == (1, 1, json.__file__)


def test_without_files_nothing_changes(tmp_path: Path) -> None:
    config = config_of(loss_fn="json:dumps")
    assert freeze(config, tmp_path).config == config
    assert not freeze(config, tmp_path).files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n", "is no Python source: invalid syntax"),
        (b"x = '\xff'\n", "cannot be copied: 'utf-8' codec can't decode"),
        (b"#" * 300_000, "have more than 256 KiB"),
    ],
)
def test_what_cannot_be_copied_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        freeze(config_of(loss_fn=f"{tmp_path}/mine.py:f"), tmp_path / "run")
    assert "algo.loss_fn" in str(caught.value)


@pytest.mark.parametrize("name", ["code/a/../../../x.py", "logs/a/x.py", "/code/a/x.py", "code/x.py"])
def test_copies_are_written_to_their_place_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="no place for a copy"):
        post_run(RunDir(tmp_path), "", {name: ""})
    assert not list(tmp_path.rglob("*.py"))
