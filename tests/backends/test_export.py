"""What leaves the trainer: bytes for engines, folders for everyone else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.backends.gang_rank import Backends, make_shards, scored, token_ids

from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.core.errors import ModelError


def test_arrays_follow_one_another_under_their_names(model: Path, backends: Backends) -> None:
    arrays = backends().export_weights()
    assert {a.spec.name: a.spec.shape for a in arrays} == read_config(model).tensor_shapes()
    offset = 0
    for array in arrays:
        assert array.spec.offset == offset
        assert array.spec.num_bytes == array.data.nbytes
        assert array.spec.dtype == "float32"
        offset += array.spec.num_bytes


def test_float32_on_a_cpu_is_not_copied(backends: Backends) -> None:
    backend = backends()
    view = np.frombuffer(backend.export_weights()[0].data, np.float32)
    before = view.copy()
    backend.train(make_shards(61)[0], {})
    assert not np.array_equal(view, before), "the view shows the live parameters"


def test_bfloat16_is_rounded(backends: Backends) -> None:
    exact, rounded = backends().export_weights(), backends(trainer={"dtype": "bfloat16"}).export_weights()
    for full, half in zip(exact, rounded, strict=True):
        assert half.spec.dtype == "bfloat16"
        assert half.data.nbytes * 2 == full.data.nbytes
        expected = torch.frombuffer(bytearray(full.data), dtype=torch.float32).bfloat16()
        assert torch.equal(torch.frombuffer(bytearray(half.data), dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_the_folder_and_agrees(tmp_path: Path, backends: Backends, dtype: str) -> None:
    backend = backends(trainer={"dtype": dtype, "export_dtype": dtype})
    backend.train(make_shards(62)[0], {})
    backend.export_hf(str(tmp_path / "hf"))
    judge: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert judge.dtype == getattr(torch, dtype)
    sample = next(s for s in make_shards(63)[0].samples if s.loss_mask.all())
    ids = torch.from_numpy(token_ids(sample).astype(np.int64))[None]
    table = judge(ids).logits[0].float().log_softmax(-1)
    places = torch.arange(len(sample.prompt_ids), sample.num_tokens)
    expected = table[places - 1].gather(-1, ids[0, places][:, None]).squeeze(-1)
    tolerance = 1e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(scored(backend, [sample])[0], expected.detach().numpy(), atol=tolerance)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("sort 312")["input_ids"]) == "sort 312"


@pytest.mark.parametrize(
    ("trains", "folder_says", "wish", "written"),
    [
        ("float32", "bfloat16", "model", "bfloat16"),
        ("float32", "torch.float16", "model", "float32"),
        ("bfloat16", "float32", "model", "float32"),
        ("bfloat16", "auto", "model", "bfloat16"),
        ("float32", "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
    ],
)
def test_g_folders_are_written_in_the_type_of_the_models_own_or_as_wished(
    tmp_path: Path, model: Path, backends: Backends, trains: str, folder_says: str, wish: str, written: str
) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    source = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(source | {"dtype": folder_says, "torch_dtype": folder_says}))
    backend = backends(folder=own, trainer={"dtype": trains, "export_dtype": wish})
    backend.export_hf(str(tmp_path / "hf"))
    said = json.loads((tmp_path / "hf/config.json").read_text())
    assert said["dtype"] == said["torch_dtype"] == written
    config = read_config(tmp_path / "hf")
    with open_weights(tmp_path / "hf", config) as tensors, open_weights(model, config) as before:
        for name in config.tensor_shapes():
            assert tensors[name].spec.dtype == written
            exact = torch.frombuffer(bytearray(before[name].data), dtype=torch.float32)
            found = torch.frombuffer(bytearray(tensors[name].data), dtype=getattr(torch, written))
            assert torch.equal(found, exact.to(getattr(torch, written))), "of the float32 masters"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, backends: Backends) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file"):
        backends().export_hf(str(tmp_path / "file" / "x"))
