"""What is seen before anything is started, check by check: packages by interpreter, functions by their source text,
devices, names of SGLang's arguments. `myxa up` and `myxa plan` look at the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.models.tiny import tiny_config, write_tokenizer
from myxa.core.config import RunConfig
from myxa.core.config.loading import Finding
from myxa.core.errors import ConfigError, ModelError, MyxaError, UserCodeError
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.files import ReadRows, fit, function_findings, read_tokenizer, train_rows
from myxa.launch.checks.node import (
    devices,
    gpus,
    interpreters,
    launched_servers,
    packages,
    server_arguments,
    server_folders,
)
from myxa.launch.host import Gpu, Gpus
from myxa.launch.supervisor.placement import place

ALL = ("torch", "megatron.core", "pynvml", "torch_memory_saver", "sglang", "math_verify", "pyarrow", "wandb", "mlflow")


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, **sections})


def missing(config: RunConfig, *modules: str) -> list[tuple[str, str]]:
    """(role, module) of what is told when these are not installed."""
    actors = place(config, 1)
    have = {name: "" for name in ALL if name not in modules}
    answers = dict.fromkeys({actor.role for actor in actors}, have)
    found = list(packages(CheckedRun(config, actors, known={interpreters: answers})))
    assert all(isinstance(finding.error, ConfigError) and finding.error.remedy for finding in found)
    return [(finding.key.split(".")[1], str(finding.error).split('"')[1]) for finding in found]


def test_who_needs_which_package() -> None:
    assert missing(run(), *ALL) == [("trainer", "torch"), ("rollout", "torch")]
    assert missing(run(), "pynvml", "sglang", "math_verify", "pyarrow", "torch_memory_saver", "megatron.core") == []
    assert missing(run(reward={"fn": "math"}), "math_verify") == [("rollout", "math_verify")]
    assert missing(run(data={"train": "a.parquet"}), "pyarrow") == [("buffer", "pyarrow")]
    assert missing(run(roles={"trainer": {"kind": "megatron"}}), "megatron.core") == [("trainer", "megatron.core")]
    far = run(monitor={"sinks": ["wandb", "mlflow", "mine:Sink"]})
    assert missing(far, "wandb", "mlflow") == [("monitor", "wandb"), ("monitor", "mlflow")]
    assert missing(run(), "wandb", "mlflow") == []
    sft = run(data={"train": "t", "preset": "chat"}, algo={"kind": "sft"}, rollout={"workflow": "demonstration"})
    assert missing(sft, "torch") == [("trainer", "torch")], "nobody generates"


def test_turns_on_gpus_need_nvml_in_every_role_that_leases() -> None:
    roles = {"trainer": {"kind": "megatron", "devices": "0"}, "rollout": {"kind": "sglang", "devices": "0"}}
    memory = {"share": "switch", "workspace_mb": 1}
    config = run(roles=roles, memory=memory, sglang={"mem_fraction_static": 0.8})
    assert missing(config, "pynvml") == [("memory", "pynvml"), ("trainer", "pynvml"), ("rollout", "pynvml")]
    on_cpu = run(memory={"share": "switch", "capacity_mb": 64})
    assert missing(on_cpu, "pynvml") == [], "the stand-in device is asked by /proc"


def test_a_path_of_the_role_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    config = run(roles={"rollout": {"env": {"PYTHONPATH": str(tmp_path)}}})
    answers = interpreters(CheckedRun(config, place(config, 1)))
    rollout, trainer = answers["rollout"], answers["trainer"]
    assert not isinstance(rollout, MyxaError)
    assert not isinstance(trainer, MyxaError)
    assert rollout["sglang"] == str(tmp_path / "sglang")
    assert trainer.get("sglang") != str(tmp_path / "sglang")


def test_versions_that_were_not_tried_are_told_once_each_and_of_what_is_used(tmp_path: Path) -> None:
    found = {"torch": "2.40.0", "megatron_core": "0.9.0", "sglang": "9.0", "transformers": "5.23.1"}
    for name, version in found.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    have = {name: str(tmp_path / name.replace(".", "/")) for name in (*ALL, "transformers")}

    def said(trainer: str) -> list[str]:
        config = run(roles={"trainer": {"kind": trainer}})
        actors = place(config, 1)
        answers = dict.fromkeys({actor.role for actor in actors}, have)
        found = packages(CheckedRun(config, actors, known={interpreters: answers}))
        told = [one for one in found if one.severity == "warning"]
        return [str(one.error).split(" is ")[0] for one in told]

    assert said("torch") == ["roles.trainer.python: torch 2.40.0"]
    assert said("megatron") == ["roles.trainer.python: torch 2.40.0", "roles.trainer.python: megatron-core 0.9.0"]


# -- functions ---------------------------------------------------------------------------------------------------------

SOURCE = """
import math
from os.path import join as glued

def plain(completion): return 1.0
def with_default(completion, scale=1.0): return 1.0
def many(*values, **named): return 1.0
def none_taken(): return 1.0
def two(completion, other): return 1.0
class Judge:
    def __call__(self, completion): return 1.0
    @staticmethod
    def fixed(completion): return 1.0
made = lambda completion: 1.0
instance: Judge = Judge()
try:
    from fast import quick
except ImportError:
    def quick(completion): return 1.0
for _ in (): inside = 1
"""


def told(tmp_path: Path, name: str, text: str = SOURCE, **reward: Any) -> list[MyxaError]:
    (tmp_path / "mine.py").write_text(text)
    fn = f"{tmp_path}/{name}" if name.startswith("mine.py") else name
    found: list[Finding] = list(function_findings(run(reward={"fn": fn, **reward})))
    assert all(finding.key == "reward.fn" for finding in found)
    return [finding.error for finding in found]


@pytest.mark.parametrize(
    "name", ["plain", "with_default", "many", "Judge", "Judge.fixed", "made", "instance", "quick", "glued", "inside"]
)
def test_functions_that_may_be_there_are_left_alone(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, f"mine.py:{name}") == []


def test_functions_that_are_not(tmp_path: Path) -> None:
    (error,) = told(tmp_path, "mine.py:plane")
    assert str(error).endswith('mine.py has no "plane" -- did you mean "plain"?')
    assert "has the signature (): too many positional arguments" in str(told(tmp_path, "mine.py:none_taken")[0])
    assert "(completion, other): missing a required argument: 'other'" in str(told(tmp_path, "mine.py:two")[0])
    assert told(tmp_path, "mine.py:two", args={"other": 3}) == [], "named arguments of the run file"
    (error,) = told(tmp_path, "mine.py:f", "def f(:\n")
    assert isinstance(error, UserCodeError)
    assert "mine.py:1)" in str(error)


@pytest.mark.parametrize("text", ["from os import *\n", "globals()['f'] = print\n", "def __getattr__(name): ...\n", ""])
def test_names_that_are_made_at_run_time_are_not_missed(tmp_path: Path, text: str) -> None:
    assert told(tmp_path, "mine.py:f", text) == []


def test_no_code_of_the_user_is_run(tmp_path: Path) -> None:
    assert told(tmp_path, "mine.py:f", f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(c): ...\n") == []
    assert not (tmp_path / "ran").exists()


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices_that_are_not_there() -> None:
    config = run(roles={"trainer": {"devices": "0-1", "count": 2}})

    def told(*found: Gpu, **more: str) -> list[Finding]:
        return list(devices(CheckedRun(config, place(config, 1), known={gpus: Gpus(found, **more)})))

    one = Gpu("H200", 1)
    assert told(one, one, driver="580") == []
    (found,) = told(one, driver="580")
    assert (found.key, found.severity) == ("roles.trainer.devices", "error")
    assert "names GPU 1, and this machine has 1" in str(found.error)
    (found,) = told(trouble="nvidia-ml-py is not installed")
    assert found.severity == "warning", "where nothing can be seen, nothing is known"


@pytest.mark.parametrize(
    ("lent", "foreign"),
    [
        ("0,1", ""), (" 1 , 0", ""), ("GPU-aa11,GPU-bb22", ""), ("GPU-a,1", ""), ("4,5", "0, 1"), ("1", "0"),
        ("", "0, 1"), ("-1", "0, 1"), ("NoDevFiles", "0, 1"), ("GPU-bb22", "0"), ("MIG-aa11,GPU-cc", "0, 1"),
    ],
)  # fmt: skip
def test_gpus_that_somebody_else_was_given_are_not_taken(monkeypatch: pytest.MonkeyPatch, lent: str, foreign: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", lent)
    config = run(roles={"trainer": {"devices": "0-1", "count": 2}})
    there = Gpus((Gpu("H200", 1, uuid="GPU-aa11"), Gpu("H200", 1, uuid="GPU-bb22")), driver="580")
    role = {"kind": "sglang", "devices": "0-1", "count": 2}  # each actor sees its own
    apart = run(roles={"rollout": role}, engine={"start_s": 60.0})
    for name, planned in (("trainer", config), ("rollout", apart)):
        said = [str(found.error) for found in devices(CheckedRun(planned, place(planned, 1), known={gpus: there}))]
        expected = [f"roles.{name}.devices names GPU {foreign}"] * bool(foreign)
        assert [text.partition(", and CUDA")[0] for text in said] == expected


# -- SGLang ------------------------------------------------------------------------------------------------------------


def test_names_of_sglangs_arguments(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt/server_args.py").write_text(
        "import torch_that_is_not_there\nclass Other:\n    x: int\nclass ServerArgs:\n    model_path: str\n"
        "    mem_fraction_static: float | None = None\n    def f(self): ...\n"
    )
    known = server_arguments(tmp_path)
    assert known == {"model_path", "mem_fraction_static"}
    assert not server_arguments(tmp_path / "nowhere")
    newer = tmp_path / "newer/srt/arg_groups/fields"
    newer.mkdir(parents=True)
    (newer.parents[1] / "server_args.py").write_text("class ServerArgs:\n    def f(self): ...\n")
    (newer / "device.py").write_text("class Device(Struct):\n    _NS = 'x'\n    device: str = ''\n    _told: int = 0\n")
    (newer / "model.py").write_text("class Model(Struct):\n    model_path: A[str, 'where'] = ''\n")
    assert server_arguments(tmp_path / "newer") == {"device", "model_path"}, "as 0.5.23 has them"


def test_the_interpreter_of_servers(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "sglang/srt").mkdir(parents=True)
    (site / "sglang/__init__.py").write_text("raise RuntimeError('imported')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec python3 "$@"\n')
    python.chmod(0o755)
    assert server_folders(str(python), {})["sglang"] == str(site / "sglang"), "found, and not imported"

    def servers(table: dict[str, Any] | None = None, **engine: Any) -> list[Finding]:
        table = {} if "attach" in engine else table or {"mem_fraction_statik": 0.8}
        devices = "0" if "speculative_algorithm" in table else "cpu"
        config = run(roles={"rollout": {"kind": "sglang", "devices": devices}}, engine=engine, sglang=table)
        return list(launched_servers(CheckedRun(config, place(config, 1))))

    assert servers(python=str(python)) == [], "nothing is known of this SGLang's arguments"
    (site / "sglang/srt/server_args.py").write_text("class ServerArgs:\n    mem_fraction_static: float\n")
    server_arguments.cache_clear()
    (found,) = servers(python=str(python))
    assert found.key == "sglang.mem_fraction_statik"
    assert str(found.error).endswith('did you mean "mem_fraction_static"?')
    experts = {"moe_a2a_backend": "deepep"}
    assert not [
        one for one in servers(experts | {"moe_a2a_backend": "none"}, python=str(python)) if "module" in str(one.error)
    ]
    (lacks,) = [one for one in servers(experts, python=str(python)) if "module" in str(one.error)]
    assert lacks.key == "sglang.moe_a2a_backend"
    assert '"deep_ep", which the servers\' interpreter lacks' in str(lacks.error)
    (site / "deep_ep.py").write_text("raise RuntimeError('imported')\n")
    assert not [one for one in servers(experts, python=str(python)) if "module" in str(one.error)]
    for table, is_lacking in (
        ({"speculative_algorithm": "nextn"}, True),
        ({"speculative_algorithm": "NEXTN", "cuda_graph_backend_decode": "disabled"}, False),
        ({"speculative_algorithm": "NGRAM"}, False),
    ):
        found = [str(one.error) for one in servers(table, python=str(python)) if "module" in str(one.error)]
        assert ['"deep_gemm"' in text and '"NGRAM"' in text for text in found] == [True] * is_lacking
    (found,) = servers(python=str(tmp_path / "none"))
    assert found.key == "engine.python"
    assert servers(attach=["http://h:1"]) == []


def test_n_grams_need_what_compiles_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang/__init__.py").touch()
    tools, python = tmp_path / "tools", tmp_path / "bin/python"
    for folder in (tools, python.parent):
        folder.mkdir()
    python.symlink_to(sys.executable)

    def lacking(name: str, **env: str) -> list[str]:
        role = {"kind": "sglang", "devices": "0", "env": {"PATH": str(tools), "PYTHONPATH": str(site), **env}}
        config = run(roles={"rollout": role}, engine={"python": str(python)}, sglang={"speculative_algorithm": name})
        found = list(launched_servers(CheckedRun(config, place(config, 1))))
        assert {one.key for one in found} <= {"sglang.speculative_algorithm"}
        return [str(one.error).split('"')[3] for one in found if "program" in str(one.error)]

    monkeypatch.delenv("CXX", raising=False)
    assert lacking("ngram") == ["c++", "ninja"] and not lacking("NEXTN")
    for path in (python.parent / "ninja", tools / "g++"):  # pip puts the first beside the servers' interpreter
        path.touch(0o755)
    assert lacking("NGRAM") == ["c++"] and not lacking("NGRAM", CXX="g++ -O1")


# -- findings ----------------------------------------------------------------------------------------------------------


def test_the_first_rows_of_data(tmp_path: Path) -> None:
    rows = ['{"prompt": "a", "label": "b"}'] * 100
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*rows[:60], "torn", *rows]) + "\n")

    def seen(**data: Any) -> ReadRows:
        (rows,) = train_rows(CheckedRun(run(data=data), ())).values()
        return rows

    assert seen(train=str(path)) == ReadRows(161, ()), "the sixty-first row is the buffer's to find"
    path.write_text("\n".join([*rows[:5], "torn", *rows]) + "\n")
    (found,) = seen(train=str(path)).findings
    assert f"{path}:6" in str(found.error) and found.severity == "error"
    assert seen(train=str(path), on_bad_line="skip").findings[0].severity == "warning"
    assert seen(train=[f"{path}@[10:30]", f"{path}@[50:]"]).num_rows == 20 + 56


@pytest.mark.parametrize(
    ("row", "meant"),
    [
        (r'{"prompt": "Put it in \\boxed{}", "label": "\boxed{1}"}', r"\boxed"),
        (r'{"prompt": "Half of \\\frac{1}{2}", "label": "1"}', r"\frac"),
        (r'{"prompt": "Put it in \\boxed{} or \\frac12", "label": "\\text{x}\fPage 2\b"}', ""),
    ],
)
def test_backslashes_that_json_took_for_control_characters(tmp_path: Path, row: str, meant: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a", "label": "b"}\n' + f"{row}\n" * 3)
    (rows,) = train_rows(CheckedRun(run(data={"train": str(path)}), ())).values()
    told = [(finding.severity, str(finding.error)) for finding in rows.findings]
    text = f"{path}:2: a control character is where {meant} was meant -- write the backslash twice in JSON"
    assert told == ([("warning", text)] if meant else [])


# -- chat templates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "max_turns", "key", "words"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", 2, "", ""),
        ("{{ messages[-1].content }}", 1, "", ""),
        ("{{ messages[-1].content }}", 2, "rollout.max_turns",
         "rollout.max_turns = 2: the chat template of {file} cannot"),
        ("{{ raise_exception('no') }}", 1, "model.path", "the chat template of {file} refuses a question: "),
        ("{{ strftime_now('%Y') }}", 1, "data.date", "the chat template of {file} writes today's date (strftime_now)"),
        ("{{ 'a' * 10 ** 9 }}", 1, "model.path", "{file} refuses a question: "),
        ("", 1, "model.path", "has no chat template"),
        ("{{ self._x }}Say 2.", 1, "model.path",
         "{file} leaves out what the user says: of a question it writes 'Say 2.'"),
        ("{% for %}", 1, "model.path", "{file}: the chat template does not compile"),
        (None, 1, "model.path", "has no chat template"),
    ],
)  # fmt: skip
def test_a_chat_template_that_cannot_do_what_the_run_needs(
    tmp_path: Path, template: str | None, max_turns: int, key: str, words: str
) -> None:
    write_tokenizer(tmp_path, tiny_config("0p5m"))
    file = tmp_path / "chat_template.jinja"
    file.unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    def seen(**sections: Any) -> list[Finding]:
        found = read_tokenizer(CheckedRun(run(**sections), ())).findings
        return [one for one in found if one.severity == "error"]

    if template is not None:
        file.write_text(template)
    found = seen(model={"path": str(tmp_path)}, rollout={"max_turns": max_turns})
    assert [finding.key for finding in found] == ([key] if key else [])
    assert all(isinstance(one.error, ModelError) and one.error.remedy for one in found)
    assert all(words.format(file=file) in str(one.error) for one in found)
    assert seen(model={"path": str(tmp_path)}, data={"train": "t", "apply_chat_template": False}) == []


def test_samples_longer_than_a_window_are_refused_where_our_own_code_computes_them(tmp_path: Path) -> None:
    source = dict(tiny_config("0p5m", vocab_size=320, context_length=256).source)
    (tmp_path / "config.json").write_text(json.dumps(source | {"use_sliding_window": True, "sliding_window": 64}))

    def told(length: int, **trainer: Any) -> list[str]:
        config = run(
            model={"path": str(tmp_path)}, engine={"context_length": length}, rollout={"max_new_tokens": 8},
            trainer=trainer, roles={"rollout": {"kind": "embedded" if not trainer else "sglang"}},
        )  # fmt: skip
        return [str(one.error) for one in fit(CheckedRun(config, place(config, 1))) if one.severity == "error"]

    assert told(64) == []
    for length in (0, 65):
        assert [text.split(" does not")[0] for text in told(length)] == ["the torch trainer", "the embedded engine"]
    assert told(0, impl="hf") == [], "transformers and SGLang cut it"
