"""What a person is told who made a mistake: place, cause and remedy on the last line, soon, with the right exit status,
and with nothing left behind. The tables of tests/error_cases.md are the cases: each row is tried and its message compared.

Three ways to try a row: the command line in this process for what is refused before anything is started; all actors of
a run on one loop of this process for what goes wrong while they work; `myxa up` in a process of its own for some rows
of both kinds, to see that what an actor says is what a person reads last.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console
from tests.harness.error_cases import Case, block, cases, section
from tests.harness.inside import inside
from tests.harness.run_job import Job, audit, events, make_job
from tests.rewards.world import call_here

from myxa.actors.buffer.groups import NUM_BATCHES, StarvationCheck
from myxa.actors.models.safetensors_file import open_safetensors
from myxa.actors.rewards.guard import GroupBudget
from myxa.core.errors import (
    DataError,
    EngineError,
    ModelError,
    MyxaError,
    PromptTooLong,
    RewardError,
    TemplateError,
    UserCodeError,
)
from myxa.core.messages import BufferStats, RunStatus
from myxa.launch.cli import main
from myxa.launch.first_failure import FirstFailure
from myxa.launch.views.live import LiveView
from myxa.launch.views.run_view import RunView

pytestmark = pytest.mark.timeout(240)

BEFORE, DURING = "Before anything is started", "While actors work"


def flags_of(row: Case) -> tuple[str, ...]:
    return tuple(part for span in row.inputs for part in span.split())


def name_of(row: Case) -> str:
    return " ".join(flags_of(row))


def fits(row: Case, said: str) -> bool:
    """`<word>` in the message stands for anything, `<n>` for a number."""
    pattern = re.escape(row.message).replace("<n>", r"\d+")
    pattern = pattern.replace("<reasons>", r"prompt\-too\-long \d+(?:, leftover \d+)?")
    return re.fullmatch(re.sub(r"<\w+>", r"\\S+", pattern), said) is not None


def by(flags: str) -> Case:
    (row,) = [row for row in cases(BEFORE) + cases(DURING) if name_of(row) == flags]
    return row


# -- a folder full of mistakes ---------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    for name in (
        "crowded_weights", "dated", "endless", "far_end", "many_layers", "nan_weights", "no_config", "no_end",
        "no_tokenizer", "no_weights", "other_type", "own_code", "piped_weights", "processor", "slow_words", "speechless",
        "t5_class", "throws_dice", "torn_weights",
    ):  # fmt: skip
        shutil.copytree(folder / "model", folder / name)
    (folder / "no_config/config.json").unlink()
    (folder / "no_tokenizer/tokenizer.json").unlink()
    (folder / "no_weights/model.safetensors").unlink()
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "other_type/config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    weights = (folder / "model/model.safetensors").read_bytes()
    (folder / "torn_weights/model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "many_layers/config.json").write_text(json.dumps({**config, "num_hidden_layers": 1 << 24}))
    (folder / "own_code/config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "own.Model"}}))
    crowded = json.dumps({f"w{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)})
    (folder / "crowded_weights/model.safetensors").write_bytes(struct.pack("<Q", len(crowded)) + crowded.encode())
    words = {
        "type": "Split", "pattern": {"Regex": "(?:1|a)+(?:a|1)+(?:1|a)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    tokens = json.loads((folder / "model/tokenizer.json").read_text())
    (folder / "slow_words/tokenizer.json").write_text(json.dumps({**tokens, "pre_tokenizer": words}))
    dice = {**tokens, "model": {**tokens["model"], "dropout": 0.5}}
    (folder / "throws_dice/tokenizer.json").write_text(json.dumps(dice))
    (folder / "speechless/chat_template.jinja").write_text("{{ messages[0].text }}")
    (folder / "piped_weights/model.safetensors").unlink()
    os.mkfifo(folder / "piped_weights/model.safetensors")
    (folder / "far_end/config.json").write_text(json.dumps({**config, "eos_token_id": 1_000_000}))
    (folder / "dated/chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "endless/chat_template.jinja").write_text(loop)
    settings = json.loads((folder / "no_end/tokenizer_config.json").read_text())
    (folder / "t5_class/tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "T5TokenizerFast"})
    )
    (folder / "processor/chat_template.jinja").rename(folder / "processor/chat_template.json")
    without = {key: value for key, value in settings.items() if key != "chat_template"}
    (folder / "processor/tokenizer_config.json").write_text(json.dumps(without))
    (folder / "no_end/tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<nowhere>"}))
    with open_safetensors(folder / "model/model.safetensors") as tensors:
        norm = tensors["model.norm.weight"].spec
    broken = bytearray(weights)
    start = 8 + int.from_bytes(weights[:8], "little") + norm.offset
    broken[start : start + norm.num_bytes] = b"\xff" * norm.num_bytes
    (folder / "nan_weights/model.safetensors").write_bytes(broken)


def make_data(folder: Path) -> None:
    good = (folder / "data/prompts.jsonl").read_text().splitlines()[:16]
    long = json.dumps({"prompt": "sort " + "123456789" * 60, "label": "1"})
    files = {
        "torn": [*good, *good, *good, *good, '{"prompt": "sort 1"', *good],  # behind the rows that are read at once
        "empty": [],
        "no_label": ['{"prompt": "sort 21", "answer": "12"}'] * 4,
        "three_rows": good[:3],
        "one_too_long": [*good[:5], long, *good[5:]],
        "too_long": [long] * 20,
        "no_demonstration": [*good[:5], '{"prompt": "sort 21", "label": "12"}'],
    }
    for name, lines in files.items():
        (folder / f"data/{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_interpreters(folder: Path) -> None:
    """Real interpreters: one that sees the standard library only, one that sees all that is installed but torch."""
    packages = folder / "no_torch/packages"
    packages.mkdir(parents=True)
    for entry in {entry for path in sys.path if path.endswith("site-packages") for entry in Path(path).iterdir()}:
        if not entry.name.startswith(("torch", "__")) and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    if not (packages / "myxa").exists():
        (packages / "myxa").symlink_to(Path(main.__code__.co_filename).parents[1])
    (folder / "bare").mkdir()
    for name, path in (("bare", ""), ("no_torch", f"PYTHONPATH={packages} ")):
        program = folder / name / "python"
        program.write_text(f'#!/bin/sh\n{path}exec {sys.executable} -S "$@"\n')
        program.chmod(0o755)


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A good job in a folder where every mistake of the page lies about."""
    job = make_job(tmp_path_factory.mktemp("bad"))
    make_models(job.folder)
    make_data(job.folder)
    make_interpreters(job.folder)
    (job.folder / "mine.py").write_text(block(DURING, "python"))
    return job


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def here(messy: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The same, and the current folder is the job's, as for somebody who types `myxa up run.toml` there."""
    monkeypatch.chdir(messy.folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return messy


def run_dirs(job: Job) -> set[Path]:
    return {path for path in job.folder.glob("runs/*") if not path.is_symlink()}


# -- before anything is started --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", cases(BEFORE), ids=name_of)
def test_what_can_be_seen_at_once(here: Job, port: int, capsys: pytest.CaptureFixture[str], row: Case) -> None:
    flags = [flag.replace("<port>", str(port)) for flag in flags_of(row)]
    command = flags if flags[0] != "--set" else ["up", "run.toml", *flags]
    before = run_dirs(here)
    code = main([*command, "--job-key", "key"] if command[0] == "launch" else command)
    said = capsys.readouterr()
    out = [line for line in said.out.splitlines() if not re.search(r" \.\.\. \(\d+ s\)$", line)]  # it took long
    assert (out, code) == ([], row.code)
    err = re.sub(r"(?m)^.* \.\.\. \(\d+ s\)\n", "", said.err)  # what is done, where it takes long
    message = err.removesuffix("\n").replace(f"{here.folder}/", "").removeprefix("myxa: ")
    assert fits(row, message), f"{message!r} is not {row.message!r}"
    assert run_dirs(here) == before, "nothing was made"


def test_several_mistakes_are_told_at_once(here: Job, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("model.path=torn_weights", "data.train=data/absent.jsonl", "roles.rollout.python=bare/python")
    code = main(["up", "run.toml", *(part for flag in flags for part in ("--set", flag))])
    first, *others = capsys.readouterr().err.replace(f"{here.folder}/", "").splitlines()
    assert (code, first) == (2, "myxa: the run cannot start: 3 problems")
    told = [by(f"--set {flag}") for flag in (flags[2], flags[0], flags[1])]
    assert [fits(row, line.strip()) for row, line in zip(told, others, strict=True)] == [True] * 3, others


# -- while a run goes on ---------------------------------------------------------------------------------------------


QUICKLY = "rollout.max_retries=0"
FEW = ("rollout.workers=1", "rollout.num_samples=2")
NEED_NO_PROCESS = [(f"reward.fn=mine.py:{name}",) for name in ("fails", "nan", "text")]
"""What their calls come to is the same in a worker process: test_reward_user_code.py."""


@pytest.mark.parametrize("row", cases(DURING), ids=name_of)
def test_what_shows_while_actors_work(here: Job, row: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if flags_of(row)[1:] in NEED_NO_PROCESS:
        call_here(monkeypatch)
    error, _ = asyncio.run(inside("run.toml", QUICKLY, *FEW, *(flag for flag in flags_of(row) if flag != "--set")))
    assert isinstance(error, MyxaError), error
    message = str(error).replace(f"{here.folder}/", "")
    assert fits(row, message), f"{message!r} is not {row.message!r}"
    assert error.exit_code == row.code


def test_a_run_whose_groups_are_all_left_out_says_so_and_goes_on(here: Job) -> None:
    flags = ("algo.group_filter=mine.py:rejects", "algo.batch_size=1", "run.num_steps=1")
    stats, run_dir = asyncio.run(inside("run.toml", QUICKLY, *flags, until=lambda stats, _: bool(stats.complaint)))
    assert isinstance(stats, BufferStats), stats
    said = re.fullmatch(
        rf"the last (\d+) groups in a row were all left out \({here.folder}/mine.py:rejects \1\) -- .*", stats.complaint
    )
    assert said
    assert int(said[1]) >= NUM_BATCHES
    (event, *_) = events(run_dir, "all-left-out")
    assert re.match(r"the last \d+ groups in a row were all left out", event["text"])

    terminal = io.StringIO()
    view = LiveView(Console(file=terminal, width=80))
    status = RunStatus(name="small", phase="running", version=0, num_steps=1)
    for buffer in (msgspec.structs.replace(stats, complaint=""), stats, stats):
        view.update(RunView(now_wall_s=1.0, started_wall_s=0.0, status=status, buffer=buffer))
    assert [stats.complaint in line for line in terminal.getvalue().splitlines()] == [False, True]


def test_an_engine_that_disagrees_with_the_trainer_pauses_the_run_with_the_reason(here: Job) -> None:
    """No two programs agree to the last bit."""
    (here.folder / "ids.py").write_text("def score(completion, **_):\n    return sum(map(ord, completion.text)) % 11\n")
    flags = ("guard.bound=1e-12", "reward.fn=ids.py:score")
    _, run_dir = asyncio.run(
        inside("run.toml", *flags, until=lambda _, run_dir: events(run_dir.path, "run-paused") != [])
    )
    (paused,) = events(run_dir, "run-paused")
    for word in ("engines and trainer disagree at weight version 0", "guard.bound is 1e-12", "docs/engines.md"):
        assert word in paused["text"]
    assert len(audit(run_dir).trained) == 4, "the step that told it, and no other"


def test_when_a_drought_is_told_and_when_it_is_hopeless() -> None:
    limit, told, number = 2 * NUM_BATCHES, list[int](), 0
    starvation = StarvationCheck(2, lambda kind, text: told.append(number))
    for number in range(1, 5 * limit):
        starvation.note_left_out("zero_variance" if number % 2 else "prompt-too-long", f"row {number}")
    assert told == [limit, 2 * limit, 4 * limit], "at the limit, then whenever it has doubled"
    assert starvation.verdict is None, "some prompts can be used"
    assert "zero_variance 100, prompt-too-long 99" in starvation.complaint
    starvation.note_kept()
    assert starvation.complaint == ""
    for number in range(limit):
        assert starvation.verdict is None
        starvation.note_left_out("prompt-too-long", f"row {number} is long")
    assert isinstance(starvation.verdict, DataError)
    assert str(starvation.verdict) == f"none of the last {limit} prompts could be used; the last one: row 39 is long"
    for number in range(1000):
        starvation.note_left_out(f"a reason of its own, {number}")
    assert starvation.complaint.count(",") < 20, "reasons made from values do not grow without end"


def test_groups_lost_to_workflow_or_engine_have_a_budget() -> None:
    budget = GroupBudget(0.25)
    for _ in range(100):  # not this budget's business
        budget.note(RewardError("a reward"))
        budget.note(PromptTooLong("a prompt"))
    for _ in range(15):
        budget.note(None)
    for _ in range(5):
        budget.note(UserCodeError("a workflow", remedy="mend it"))
    with pytest.raises(UserCodeError) as caught:
        budget.note(UserCodeError("a workflow", remedy="mend it"))
    assert str(caught.value) == (
        "6 of the last 21 groups were lost, more than reward.max_error_rate = 0.25 allows; the last one: a workflow "
        "-- mend it"
    )
    for error, kind in (
        (EngineError("it"), EngineError),
        (DataError("it"), DataError),
        (TemplateError("it"), ModelError),
    ):
        with pytest.raises(kind, match="the last one: it"):
            budget.note(error)


# -- by the command itself -------------------------------------------------------------------------------------------


def left_alive(job: Job) -> list[str]:
    """Processes, other than this one, that work in the job's folder."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(job.folder):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def run(job: Job, *flags: str) -> tuple[int, list[str]]:
    code, said, _ = job.run(*(flag for flag in flags if flag != "--set"))
    assert left_alive(job) == []
    return code, said.replace(f"{job.folder}/", "").splitlines()


def test_the_cause_is_the_last_line_of_a_run(here: Job) -> None:
    row = by("--set data.train=data/torn.jsonl")
    code, lines = run(here, *flags_of(row))
    assert code == row.code, lines
    *_, log, failure, last = lines
    assert fits(row, last.removeprefix("myxa: ")), last
    assert failure.startswith(f"first failure: buffer ended with exit status {row.code}: ")
    assert last in Path(log.removeprefix("log: ")).read_text().replace(f"{here.folder}/", "").splitlines()[-1]
    assert "Traceback" not in "\n".join(lines), "the traceback is in the log"


def test_a_package_that_does_not_load_is_told_once(here: Job) -> None:
    (here.folder / "broken/torch").mkdir(parents=True)
    (here.folder / "broken/torch/__init__.py").write_text(
        "raise ImportError('libcudart.so.12: no such file', name='torch')\n"
    )
    code, lines = run(here, 'roles.trainer.env={PYTHONPATH="broken"}')
    assert code == 2, lines
    (documented,) = re.findall(r"^`(<python> cannot import .*)`\.$", section(DURING), re.MULTILINE)
    values = {"python": sys.executable, "module": "torch", "why": "libcudart.so.12: no such file"}
    assert lines[-1] == "myxa: " + re.sub(r"<(\w+)>", lambda word: values.get(word[1], word[0]), documented)
    assert not any("attempt 1" in line for line in lines), "another attempt would end the same way"


def test_a_prompt_that_does_not_fit_costs_itself_only(here: Job) -> None:
    flags = ("data.train=data/one_too_long.jsonl", "engine.context_length=128", "run.num_steps=5")
    status, run_dir = asyncio.run(inside("run.toml", *flags))
    assert isinstance(status, RunStatus) and status.phase == "finished", status
    told = [event["text"] for event in events(run_dir, "group-dropped")]
    assert len(told) == 1
    assert re.fullmatch(r"group \d+: prompt of row 5 in .*/one_too_long\.jsonl has \d+ tokens, .* -- .*", told[0])
    facts = audit(run_dir)
    assert facts.states["DROPPED"] == 1
    assert len(set(facts.trained)) == 20


def test_only_the_cause_is_shown_of_a_users_mistake() -> None:
    tail = ("Traceback (most recent call last):", "  ...", "myxa: row 7 is rotten -- mend it")
    failure = FirstFailure("buffer", "buffer ended with exit status 5", "logs/buffer.0.log", tail, status=5)
    words = ["first failure: buffer ended with exit status 5", "myxa: row 7 is rotten -- mend it"]
    assert failure.last_words().splitlines() == ["log: logs/buffer.0.log", *words]
    assert failure.report().splitlines() == [*words, "log: logs/buffer.0.log"]
    lines = replace(failure, status=1).report().splitlines()
    assert lines == [*words, "---- end of logs/buffer.0.log ----", *tail[:2]], "of anything else the end of the log"
