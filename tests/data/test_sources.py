"""Several named sources of prompts: each read by its own keys and in its own order, one fingerprint for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.data.opened import prompts, write_rows

from myxa.actors.data import Dataset, open_data
from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError, DataError


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    return write_rows(folder / f"{name}.jsonl", *rows)


def numbered(folder: Path, name: str, num_rows: int) -> str:
    return write(folder, name, [{"prompt": f"{name} {number}", "label": "1"} for number in range(num_rows)])


def opened(sources: dict[str, dict[str, Any]], seed: int = 1, **data: Any) -> Dataset:
    raw = {"run": {"seed": seed}, "model": {"path": "m"}, "data": {"sources": sources, **data}}
    found = open_data(RunConfig.model_validate(raw))
    assert isinstance(found, Dataset)
    return found


def test_each_is_read_by_its_own_keys_and_tells_its_name(tmp_path: Path) -> None:
    math = write(tmp_path, "math", [{"question": "1+1", "answer": "2"}])
    asked = {"messages": [{"role": "user", "content": "hi"}], "label": "y", "metadata": {"data_source": "x"}}
    chat = write(tmp_path, "chat", [asked])
    dataset = opened(
        {"math": {"path": math, "system": "count"}, "chat": {"path": chat, "preset": "chat", "weight": 3.0}},
        preset="plain", prompt_key="question", label_key="answer", system="talk",
    )  # fmt: skip
    assert list(dataset.by_name) == ["chat", "math"]
    assert dataset.weights == {"math": 1.0, "chat": 3.0}
    (one,), (other,) = (prompts(dataset.by_name[name], 1) for name in ("math", "chat"))
    assert [m.content for m in one.messages] == ["count", "1+1"] and one.label == "2"
    assert (one.source_name, one.metadata["data_source"]) == ("math", "math")
    assert [m.content for m in other.messages] == ["talk", "hi"], "the columns are the preset's, the rest is [data]'s"
    assert (other.source_name, other.metadata["data_source"]) == ("chat", "x"), "what the row says itself stays"


def test_each_goes_its_own_way_through_its_own_passes(tmp_path: Path) -> None:
    paths = {name: numbered(tmp_path, name, 30) for name in ("a", "b")}
    dataset = opened({"a": {"path": paths["a"]}, "b": {"path": paths["b"], "max_passes": 0}}, max_passes=2)
    a, b = dataset.by_name["a"], dataset.by_name["b"]
    assert [p.row for p in prompts(a, 30)] != [p.row for p in prompts(b, 30)], "not the same permutation"
    assert sorted(p.row for p in prompts(a, 60)) == sorted([*range(30)] * 2)
    assert a.prompt(60) is None and a.row_of(60) is None
    assert (a.num_draws, b.num_draws) == (60, None)
    for draw in range(60):
        found = a.prompt(draw)
        assert found is not None and a.row_of(draw) == found.row and found.pass_index == draw // 30


def test_the_fingerprint_is_of_what_may_be_drawn_not_of_its_share(tmp_path: Path) -> None:
    a, b = numbered(tmp_path, "a", 5), numbered(tmp_path, "b", 5)
    same = opened({"a": {"path": a}, "b": {"path": b}}).fingerprint
    assert opened({"b": {"path": b, "weight": 7.0}, "a": {"path": a, "max_passes": 3}}).fingerprint == same
    others = [
        opened({"a": {"path": a}, "b": {"path": b}}, seed=2),
        opened({"a": {"path": a}, "c": {"path": b}}),
        opened({"a": {"path": b}, "b": {"path": a}}),
        opened({"a": {"path": a}}),
        opened({"a": {"path": a}, "b": {"path": b, "system": "s"}}),
    ]
    assert len({same, *(other.fingerprint for other in others)}) == 6


def test_mistakes_name_the_source(tmp_path: Path) -> None:
    a = numbered(tmp_path, "a", 2)
    torn = write(tmp_path, "torn", [{"promt": "x"}])
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.path: there is no file"):
        opened({"a": {"path": a}, "b": {"path": str(tmp_path / "none.jsonl")}})
    with pytest.raises(DataError, match=r'torn\.jsonl:1: column "prompt" is missing'):
        opened({"a": {"path": a}, "b": {"path": torn}})
    with pytest.raises(DataError, match=r"data\.sources\.b\.path: none of the 1 rows is good"):
        opened({"a": {"path": a}, "b": {"path": torn}}, on_bad_line="skip")
    small = opened({"a": {"path": a}, "b": {"path": a, "weight": 0.0}, "c": {"path": a}}, max_passes=2)
    small.check_batch(8)
    with pytest.raises(
        DataError, match="all passes over the rows are 8 prompts, fewer than one batch, algo.batch_size = 9"
    ):
        small.check_batch(9)
    opened({"a": {"path": a}, "b": {"path": a, "max_passes": 0}}, max_passes=2).check_batch(9)


def test_skipped_rows_of_every_file_are_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"prompt": "q", "label": "1"}]
    paths = {name: write(tmp_path, name, [*good, {"promt": name}]) for name in ("a", "b", "held")}
    raw = {
        "model": {"path": "m"}, "eval": {"data": paths["held"]},
        "data": {"sources": {name: {"path": paths[name]} for name in ("a", "b")}, "on_bad_line": "skip"},
    }  # fmt: skip
    dataset = open_data(RunConfig.model_validate(raw))
    assert [p.group_id for p in dataset.eval_prompts(5)] == [-1]
    assert dataset.num_bad == len(dataset.bad_rows) == 3
    (said,) = caplog.messages
    assert said.startswith("3 bad rows are left out; the first: ")
    assert all(f'{name}.jsonl:2: column "prompt" is missing' in said for name in ("a", "b", "held"))
