"""Checkpoints that other programs wrote by megatron-core become HuggingFace folders, and what is none is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.test_megatron_model import make_folder
from tests.harness.ports import held_port

from myxa.actors.backends.convert import convert
from myxa.core.errors import TrainError
from myxa.launch.cli import main

pytestmark = pytest.mark.timeout(150)
MODELS = ("moe-mixed", "deepseek", "moonlight")
RANK = Path(__file__).with_name("megatron_foreign.py")
TIED = {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[..., list[tuple[int, str]]]) -> Path:
    """Holds the models' folders, and under `out` what a gang made of each."""
    place = tmp_path_factory.mktemp("foreign")
    folders = [str(make_folder(place, name)) for name in MODELS]
    for folder in folders:
        (Path(folder) / "tokenizer.json").write_text("{}")
    (place / "spec.json").write_text(json.dumps({"port": held_port(), "folders": folders, "out": str(place / "out")}))
    for status, output in ranks(2, RANK, str(place / "spec.json")):
        assert status == 0, output[-4000:]
    return place


@pytest.mark.parametrize("kind", ["", "-ours"])
@pytest.mark.parametrize("name", MODELS)
def test_its_weights_are_those_that_it_was_made_of(written: Path, name: str, kind: str, tmp_path: Path) -> None:
    """Also where our layers wrote it, cut by tensor parallelism."""
    done = convert(written / "out" / f"{name}{kind}", written / name, tmp_path / "hf")
    assert (done["backend"], done["num_updates"], done["dtype"]) == ("megatron", 100, "float32")
    expected, found = (load_file(folder / "model.safetensors") for folder in (written / name, tmp_path / "hf"))
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key


def test_the_command_takes_it_too(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(written / "out" / "deepseek" / "iter_0000100")
    assert main(["convert", checkpoint, str(tmp_path / "hf")]) != 0
    assert "--model" in capsys.readouterr().err
    assert main(["convert", checkpoint, str(tmp_path / "hf"), "--model", str(written / "deepseek")]) == 0
    assert "100 updates" in capsys.readouterr().out


def test_what_is_of_another_model_or_format_is_refused_by_name(written: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"linear_proj.weight of \[32, 40\] does not make weights of \[\[32, 64\]\]"):
        convert(written / "out" / "deepseek", written / "moe-mixed", tmp_path / "hf")
    with pytest.raises(TrainError, match=r"does not make weights of"):
        small = with_config(written / "deepseek", tmp_path / "smaller", {"num_hidden_layers": 3})
        convert(written / "out" / "deepseek", small, tmp_path / "hf")
    with pytest.raises(TrainError, match=r"lm_head.weight differs from the embedding, but tie_word_embeddings is true"):
        convert(
            written / "out" / "deepseek", with_config(written / "deepseek", tmp_path / "tied", TIED), tmp_path / "hf"
        )
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(TrainError, match="no checkpoint in Megatron's torch_dist format"):
        convert(tmp_path / "iter_0000007", written / "deepseek", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def with_config(folder: Path, copy: Path, changes: dict[str, Any]) -> Path:
    """Its configuration, changed, without weights."""
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


class Hostile:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_index_runs_no_code_and_names_no_file_elsewhere(written: Path, protocol: int, tmp_path: Path) -> None:
    shutil.copytree(written / "out" / "moonlight", tmp_path / "run")
    index = tmp_path / "run" / "iter_0000100" / ".metadata"
    whole = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps([whole, Hostile(tmp_path / "ran")], protocol))
    with pytest.raises(TrainError, match=r"cannot read .*\.metadata: it names .*, which no index needs"):
        convert(tmp_path / "run", written / "moonlight", tmp_path / "hf")
    assert not (tmp_path / "ran").exists()
    next(iter(whole.storage_data.values())).relative_path = "../../secret"
    index.write_bytes(pickle.dumps(whole, protocol))
    with pytest.raises(TrainError, match=r"it names the file '\.\./\.\./secret'"):
        convert(tmp_path / "run", written / "moonlight", tmp_path / "hf")
