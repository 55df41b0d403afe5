"""What README and tutorials tell one to type is typed here, in the order of the page, on models with random weights.

A command that is not typed here says that it needs a GPU or the network, or ELSEWHERE says who types it.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.control.live import Live, made_steps
from tests.harness.commands import Command
from tests.harness.hub import Hub
from tests.harness.run_job import Job, audit, newest_step
from tests.harness.waiting import wait_until
from tests.plan.memory_cases import SHAPES

from myxa.actors.checkpoints.folder import newest_whole
from myxa.actors.models.tiny import make_tiny_model, tiny_config, write_tokenizer

ROOT = Path(__file__).parents[2]
README, TUTORIAL, GSM8K = ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "gsm8k.md"
MARKS = ("# needs a GPU", "# needs the network")
ELSEWHERE = {
    "make demo": ".ci/run and tests/release/test_package.py",
    "make test": ".ci/run",
    "git clone ... && cd myxa": ".ci/run, which begins in a fresh clone",
    ". .venv/bin/activate": "every test: they run in it",
    "mkdir gsm8k && cd gsm8k": "the test's folder",
    "myxa init my-task && cd my-task": "tests/integration/test_init.py",
}
"""Command -> where it is run."""
pytestmark = pytest.mark.timeout(180)


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """Those that can be typed here, one after the other, without what the page says of them."""
    lines = (re.split(r"\s+#", line)[0].strip() for line in block.splitlines() if not line.endswith(MARKS))
    return [part.strip() for line in lines for part in line.split("; ") if part]


@pytest.mark.parametrize("page", [README, TUTORIAL, GSM8K], ids=lambda page: page.name)
def test_every_command_of_the_page_is_typed_somewhere(page: Path) -> None:
    typed_blocks = (*blocks(TUTORIAL, "sh")[1:], blocks(README, "sh")[1], blocks(GSM8K, "sh")[1])
    typed = {*ELSEWHERE}.union(*map(commands, typed_blocks))
    assert [one for block in blocks(page, "sh") for one in commands(block) if one not in typed] == []
    unnamed = [block for block in blocks(page, "") if re.search(r"^(myxa|make|python|pip) ", block, re.MULTILINE)]
    assert unnamed == [], "a block of commands is marked as sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one has when the tutorial says to check and run: the files of the page, with fewer held-out rows and more
    steps of fewer groups."""
    place = tmp_path_factory.mktemp("my-task")
    make_tiny_model(place / "model", preset="0p5m", seed=0)
    code = blocks(TUTORIAL, "python")[0]
    assert '"heldout.jsonl": 128' in code
    (place / "my_task.py").write_text(code.replace('"heldout.jsonl": 128', '"heldout.jsonl": 8'))
    smaller = {
        "num_steps = 60": "num_steps = 100000",
        "batch_size = 32": "batch_size = 4",
        "max_groups = 96": "max_groups = 8",
    }
    text = blocks(TUTORIAL, "toml")[0]
    for shown, ours in smaller.items():
        assert text.count(shown) == 1
        text = text.replace(shown, ours)
    (place / "run.toml").write_text(text.replace('kind = "grpo"', 'kind = "grpo"\ngroup_filter = "none"'))
    return place


@contextmanager
def running(words: list[str], place: Path, steps: int) -> Iterator[Live]:
    """The command's run, once it has made step number `steps`, until Ctrl-C."""
    live = Live(Job(place), Command(words, place))
    try:
        wait_until(lambda: live.job.has("control.json") and made_steps(live, steps), f"{steps} steps")
        yield live
    finally:
        live.launcher.send_signal(signal.SIGINT)
        said, _ = live.launcher.communicate(timeout=90)
    assert live.launcher.returncode == 130, said
    can_continue = newest_whole(live.run_dir / "checkpoints", reads_all=False)[0] is not None
    assert (f"to continue: myxa resume {live.run_dir}" in said) == can_continue, said


def typed(live: Live, command: str) -> str:
    """What it said; it must end well."""
    words = shlex.split(command)
    if words == ["myxa", "top"]:
        with Command(words[1:], live.job.folder) as top:
            assert top.stdout
            return top.stdout.readline()
    done = live.myxa(*words[1:]) if words[0] == "myxa" else live.shell(command)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_tutorial_and_readme_are_typed_on_one_run(folder: Path) -> None:
    """Its reward leaves the processor to the commands."""
    code = (folder / "my_task.py").read_text()
    slow = code.replace("    return float(", "    __import__('time').sleep(0.1)\n    return float(")
    assert slow != code
    (folder / "my_task.py").write_text(slow)
    before = Live(Job(folder), Command(["--version"], folder))
    before.launcher.communicate(timeout=60)
    *check, up = commands(blocks(TUTORIAL, "sh")[1])
    for command in check:
        typed(before, command)
    assert up == "myxa up run.toml"
    assert json.loads((folder / "heldout.jsonl").read_text().splitlines()[0])["label"]
    *others, fork = commands(blocks(README, "sh")[1])
    with running(shlex.split(up)[1:], folder, steps=4) as live:
        first = live.run_dir
        for command in [*commands(blocks(TUTORIAL, "sh")[2]), *others]:
            typed(live, command)
        wait_until(lambda: any(first.glob("checkpoints/version_*/")), "the checkpoint")
        typed(live, f"{fork} --no-start --name twin")
    assert (first / "report.html").exists()
    with running(["resume", str(first)], folder, steps=newest_step(Job(folder)) + 5):
        pass
    found = audit(first)
    assert len(found.trained) == len(set(found.trained)) >= 20


def test_other_words_are_imitated_and_then_trained_on(folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "mine", ignore=shutil.ignore_patterns("runs")))
    warm_up = blocks(TUTORIAL, "toml")[1]
    assert warm_up.count("num_steps = 40") == warm_up.count("batch_size = 64") == 1
    smaller = warm_up.replace("num_steps = 40", "num_steps = 3").replace("batch_size = 64", "batch_size = 8")
    (place / "warm_up.toml").write_text(smaller)
    (place / "my_task.py").write_text((place / "my_task.py").read_text().replace(".sleep(0.1)", ".sleep(0)"))
    live = Live(Job(place), Command(["--version"], place))
    live.launcher.communicate(timeout=60)
    typed(live, "python my_task.py")
    imitate, train = commands(blocks(TUTORIAL, "sh")[3])
    assert "finished after 3 of 3 steps" in typed(live, imitate)
    assert "finished after 2 of 2 steps" in typed(live, f"{train} --set run.num_steps=2")
    begun = json.loads((place / "runs" / "latest" / "origin.json").read_text())
    assert begun and (place / "runs" / "latest").resolve().name.startswith("my-task-")


CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
---
"""


def gsm8k(num_rows: int) -> bytes:
    """Rows like those of GSM8K, as parquet."""
    rows = {
        "question": [f"Ann has {n} apples and gets 2 more. How many has she?" for n in range(num_rows)],
        "answer": [f"She has {n}+2=<<{n}+2={n + 2}>>{n + 2}.\n#### {n + 2}" for n in range(num_rows)],
    }
    file = io.BytesIO()
    parquet.write_table(pa.table(rows), file)
    return file.getvalue()


def test_gsm8k_is_rehearsed_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a stand-in that has the real model's config.json and size."""
    for name, text in zip(("run.toml", "gpu.toml"), blocks(GSM8K, "toml"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "real").mkdir()
    write_tokenizer(tmp_path / "real", tiny_config("1m"))
    (tmp_path / "real" / "config.json").write_text(json.dumps(dict(SHAPES["0.6B"].source)))
    (tmp_path / "real" / "model.safetensors").write_bytes(b"")
    hub = Hub()
    hub.add_folder("models", "Qwen/Qwen3-0.6B", tmp_path / "real", sizes={"model.safetensors": 1_503_300_328})
    rows = {f"main/{name}-00000-of-00001.parquet": gsm8k(number) for name, number in {"train": 64, "test": 16}.items()}
    hub.add("datasets", "openai/gsm8k", {"README.md": CARD, **rows})
    make, up, *others = commands(blocks(GSM8K, "sh")[1])
    with hub.serving():
        for key, value in hub.env(tmp_path / "home").items():
            monkeypatch.setenv(key, value)
        done = Live(Job(tmp_path), Command(["--version"], tmp_path))
        done.launcher.communicate(timeout=60)
        typed(done, make)
        assert "finished after 2 of 2 steps" in typed(done, up)
        said = [typed(done, command) for command in others]
    assert "Ann has" in said[0] and "GPU 0" in said[1]
    assert re.search(r"hf://Qwen/Qwen3-0.6B@[0-9a-f]{40}: 1.4 GiB to fetch", said[1])
