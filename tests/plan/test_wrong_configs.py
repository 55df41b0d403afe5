"""Ways to get a run file wrong that take more than the file to see, and a few that do not: each is rejected by
`myxa plan` soon, with its line and what to do. tests/config/test_run_file_mistakes.py has the others."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
from tests.plan.planned import RUN, Site, plan

pytestmark = pytest.mark.timeout(120)

CPU_S = 2.0
"""Of this process: what other work on the machine takes does not count."""


class Wrong(NamedTuple):
    """One mistake. `old` in the good file becomes `new`; the error is to stand on the line `line`."""

    old: str
    new: str
    line: str
    word: str
    """Of what to do."""
    key: str = ""
    """Dotted path, if it is not to be seen from the line."""


def add(section: str, line: str, word: str, key: str = "") -> Wrong:
    """A line more at the top of a section that is there."""
    return Wrong(f"[{section}]\n", f"[{section}]\n{line}\n", line, word, key)


def end(text: str, line: str, word: str, key: str = "") -> Wrong:
    return Wrong("[roles.rollout]\ncount = 2\n", f"[roles.rollout]\ncount = 2\n{text}\n", line, word, key)


def instead(old: str, new: str, word: str, key: str = "") -> Wrong:
    return Wrong(old, new, new, word, key)


SHARED = """\
[memory]
share = "switch"
"""

WRONG: dict[str, Wrong] = {
    "sink misspelt": add("monitor", 'sinks = ["wnadb"]', "did you mean 'wandb'", "monitor.sinks"),
    "option of a sink misspelt": Wrong(
        "[monitor]\n", '[monitor.options.wandb]\nprojct = "x"\n[monitor]\nsinks = ["wandb"]\n', "[monitor.options.wandb]", 'did you mean "project"'
    ),
    # batch and steps
    "less data than a batch": Wrong(
        'train = "data/train.jsonl"', 'train = "data/three.jsonl"\nmax_passes = 1', "batch_size = 8", "lower algo.batch_size"
    ),
    # context
    "context longer than the model's": instead("context_length = 256", "context_length = 999999", "lower it"),
    "adapters that SGLang would put together wrongly": end(
        'kind = "sglang"\n[lora]\nrank = 4\nrollout = "adapter"\ntarget_modules = ["k_proj"]', 'rollout = "adapter"',
        'set it to "merged"', "lora.rollout",
    ),
    # model
    "model with experts for torch": instead('path = "model"', 'path = "moe_type"', "use one of type"),
    # data
    "data compressed": instead('train = "data/train.jsonl"', 'train = "data/packed.jsonl"', "copy it again"),
    "data a folder": instead('train = "data/train.jsonl"', 'train = "data"', "write one JSON object per line"),
    # code
    "reward function missing": instead('fn = "mine.py:score"', 'fn = "mine.py:scor"', 'did you mean "score"'),
    "reward file broken": instead('fn = "mine.py:score"', 'fn = "broken.py:score"', "mend it"),
    "reward with an argument misspelt": Wrong(
        'fn = "mine.py:score"', 'args = { tolerence = 0.1 }\nfn = "numeric"', "args = { tolerence = 0.1 }", 'did you mean "tolerance"'
    ),
    "group reward of two values": Wrong(
        'fn = "mine.py:score"', 'scope = "group"\nfn = "mine.py:two_needed"', 'fn = "mine.py:two_needed"', "it must look like: def rewards"
    ),
    "remote reward without address": Wrong(
        'fn = "mine.py:score"', 'fn = "remote"\nargs = { tries = 2 }', "args = { tries = 2 }", "http://host:port/path"
    ),
    "d07 workflow with an argument it has not": Wrong(
        "[rollout]\n", '[rollout]\nworkflow = "mine.py:flow"\nworkflow_args = { mood = 1 }\n', 'workflow = "mine.py:flow"',
        'did you mean "mode"'
    ),
    "d07 workflow without an argument it needs": add("rollout", 'workflow = "mine.py:needy"', "and what rollout.workflow_args holds: nothing"),
    "d07 class of a workflow": Wrong(
        "[rollout]\n", '[rollout]\nworkflow = "mine.py:Flow"\nworkflow_args = { prise = 1 }\n', 'workflow = "mine.py:Flow"',
        'did you mean "price"'
    ),
    "critic under Megatron": Wrong(
        "[roles.trainer]\n", '[critic]\nenabled = true\n[roles.trainer]\nkind = "megatron"\n', "enabled = true",
        'needs roles.trainer.kind = "torch"'
    ),
    "critic without weights": Wrong(
        'kind = "grpo"\nbatch_size = 8\nminibatches = 2\n',
        'kind = "ppo"\nbatch_size = 8\nminibatches = 2\n[critic]\nenabled = true\npath = "no_weights"\n',
        'path = "no_weights"', "convert the weights to safetensors"
    ),
    "advantages missing": add("algo", 'advantage_fn = "mine.py:kep"', 'did you mean "keep"'),
    "loss of two values": add("algo", 'loss_fn = "mine.py:two_needed"', "it must look like: def loss"),
    "post-process that is async": add("algo", 'reward_post_process = "mine.py:later"', "it must look like: def process"),
    "filter missing": add("algo", 'group_filter = "mine.py:kep"', 'did you mean "keep"'),
    # places
    "node that is not there": add("roles.rollout", "nodes = [0, 3]", "--nnodes"),
    "more quorum than actors": add("roles.rollout", "quorum = 9", "the run has 2 rollout actors"),
    # layouts
    "layout that does not divide ranks": Wrong(
        "[roles.trainer]\n", '[megatron]\ntp = 3\n[roles.trainer]\nkind = "megatron"\n', "count = 2", "does not divide"
    ),
    "layout that does not cut the model": Wrong(
        "[roles.trainer]\ncount = 2", '[megatron]\ntp = 8\n[roles.trainer]\nkind = "megatron"\ncount = 8', "tp = 8",
        "choose a divisor of"
    ),
    "field of megatron-core unknown": Wrong(
        "[roles.trainer]\n", '[megatron.model]\nnum_layerz = 3\n[roles.trainer]\nkind = "megatron"\n', "num_layerz = 3",
        "did you mean"
    ),
    "setting of its optimizer that is another key": Wrong(
        "[roles.trainer]\n", '[megatron.optimizer]\nlr = 0.1\n[roles.trainer]\nkind = "megatron"\n', "lr = 0.1",
        "leave it out"
    ),
    "field of its data parallelism unknown": Wrong(
        "[roles.trainer]\n", '[megatron.ddp]\noverlap_grad_reduc = true\n[roles.trainer]\nkind = "megatron"\n',
        "overlap_grad_reduc = true", 'did you mean "overlap_grad_reduce"'
    ),
    # engines and weights
    "attached address without http": Wrong(
        "[roles.rollout]\n", '[roles.rollout]\nkind = "sglang"\n[engine.x]\n', "[engine.x]", "known:"
    ),
    "key that is not set": Wrong(
        "[roles.rollout]\ncount = 2",
        '[roles.rollout]\nkind = "sglang"\ncount = 1\n[engine]\nattach = ["http://127.0.0.1:1"]\nkey_env = "MYXA_NO_SUCH_KEY"',
        'key_env = "MYXA_NO_SUCH_KEY"', "set it in the environment"
    ),
    "sizes of SGLang that its GPUs do not have": Wrong(
        "[roles.rollout]\ncount = 2",
        '[sglang]\ntp_size = 4\n[roles.rollout]\nkind = "sglang"\ncount = 1\ndevices = "0-1"', "[sglang]", "change the sizes"
    ),
    "SGLang not installed": add("roles.rollout", 'kind = "sglang"', "set engine.python", "roles.rollout.python"),
    # memory in turns
    "turns without a size on the CPU": end(SHARED, 'share = "switch"', "a device on the CPU", "memory.capacity_mb"),
    # what is written
    "folder that is a file": add("run", 'dir = "mine.py"', "set run.dir"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_is_rejected_with_line_and_remedy(site: Site, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wrong = WRONG[name]
    assert RUN.count(wrong.old) == 1, "the mistake must hit one place"
    text = RUN.replace(wrong.old, wrong.new)
    if "[engine]\nmax_running" in text and text.count("[engine]\n") == 2:  # a table may be written once only
        text = text.replace("[engine]\nmax_running = 32\ncontext_length = 256\n", "")
    file = site.write(text)
    before_s = time.process_time()
    code, answer = plan(file, capsys=capsys)
    spent_s = time.process_time() - before_s
    assert code == 2
    assert answer["ok"] is False
    errors = [one for one in answer["problems"] if one["severity"] == "error"]
    lines = text.splitlines()
    where = {number for number, line in enumerate(lines, 1) if line == wrong.line}
    if wrong.key:  # a default, or a line that is not there: the section's, or the file's
        found = [one for one in errors if one["key"] == wrong.key]
    else:
        assert where, f"no line {wrong.line!r}"
        found = [one for one in errors if one["line"] in where]
    assert found, errors
    assert any(wrong.word in f"{one['message']} -- {one['remedy']}" for one in found), found
    assert all(one["file"] == str(file) for one in found)
    assert len(errors) <= 3, f"one mistake is told as {errors}"
    assert spent_s < CPU_S, f"{spent_s:.2f} s of CPU"


def test_all_mistakes_of_a_file_are_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the file itself; once there are none, those of what it names."""
    of_names = (
        ('path = "model"', 'path = "modell"'),
        ('train = "data/train.jsonl"', 'train = "data/trian.jsonl"'),
        ('fn = "mine.py:score"', 'fn = "mine.py:scor"'),
        ("checkpoint_every = 10", 'checkpoint_every = 10\nresume = "nowhere"'),
    )
    of_keys = (("lr = 1e-4", "lr = -1"), ("batch_size = 8", "batchsize = 8"))
    for mistakes, keys in (
        ((*of_names, *of_keys), ["algo.batchsize", "optimizer.lr"]),
        (of_names, ["model.path", "data.train", "reward.fn", "trainer.resume"]),
    ):
        text = RUN
        for old, new in mistakes:
            text = text.replace(old, new)
        code, answer = plan(site.write(text), capsys=capsys)
        assert (code, [one["key"] for one in answer["problems"]]) == (2, keys)
        lines = [one["line"] for one in answer["problems"]]
        assert lines == sorted(lines) and all(lines)


def test_a_mistake_is_not_judged_by_the_default_in_its_place(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has experts, which torch does not run; but the user never said torch."""
    text = RUN.replace('path = "model"', 'path = "moe_type"').replace(
        "[roles.trainer]\n", '[roles.trainer]\nkind = "megatorn"\n'
    )
    text = text.replace("[roles.rollout]\n", '[roles.rollout]\nkind = "sglang"\n')
    code, answer = plan(site.write(text), capsys=capsys)
    assert code == 2
    assert not any("torch trainer" in one["message"] for one in answer["problems"])


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [("[run]\nname = \n", 2, "is not TOML"), ("[run]\n[run]\n", 2, "is not TOML"), ("", 0, "model.path: is missing")],
)
def test_what_is_no_run_file(site: Site, capsys: pytest.CaptureFixture[str], text: str, line: int, word: str) -> None:
    code, answer = plan(site.write(text), capsys=capsys)
    assert code == 2
    assert any(one["line"] == line and word in one["message"] for one in answer["problems"]), answer
