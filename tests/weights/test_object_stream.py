"""What SGLang is handed is what its reader expects; and there is no reader of ours."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tests.weights.model_tensors import shape
from torch.multiprocessing import reductions

from myxa.actors.weights.channels.cuda_ipc import Made, Name, bucket_metadata, payload_of, shared_tensor, write_object
from myxa.actors.weights.channels.plan import make_plan
from myxa.core.errors import TrainError

METADATA = "sglang.srt.weight_sync.tensor_bucket"


@dataclass
class FlattenedTensorMetadata:
    """SGLang's, field for field (0.5.17)."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class Reader(pickle.Unpickler):
    """Takes only what SGLang's own reader lets through, as far as we use it."""

    def find_class(self, module_name: str, global_name: str):
        assert module_name.split(".")[0] in ("torch", "sglang"), f"{module_name} would be blocked"
        if module_name == METADATA:
            return {"FlattenedTensorMetadata": FlattenedTensorMetadata}[global_name]
        return super().find_class(module_name, global_name)


def read(raw: bytes):
    return Reader(io.BytesIO(raw)).load()


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**62, -(2**63), 255, 256,
        "", "a", "Gewicht ß 重み", b"", bytes(range(256)), (), (1,), (1, (2, "x")), [], [1, [b"2"]],
        {}, {"a": 1, "b": [None, {"c": (True,)}]},
    ],
)  # fmt: skip
def test_values_come_back_as_they_went(value: object):
    raw = write_object(value)
    assert pickle.loads(raw) == value
    assert type(pickle.loads(raw)) is type(value)
    assert raw[0] == 0x80 and raw[1] <= pickle.HIGHEST_PROTOCOL, "SGLang knows it by its first bytes"


def test_names_and_calls():
    assert read(write_object(Name("torch", "bfloat16"))) is torch.bfloat16
    made = read(write_object(Made(Name("torch", "Size"), ((3, 4),))))
    assert made == torch.Size((3, 4))


@pytest.mark.parametrize("value", [1.5, {1, 2}, object(), torch.zeros(2), {"a": 2.0}])
def test_other_kinds_are_refused(value: object):
    with pytest.raises(TypeError, match="cannot write"):
        write_object(value)


def test_a_bucket_is_read_as_sglang_reads_it():
    plan = make_plan(
        [shape("model.layers.0.mlp.up_proj.weight", "bfloat16", (3, 4)), shape("model.norm.weight", "float32", (5,))],
        1 << 20,
    )
    tensor = Made(Name("torch", "arange"), (44,))
    payload = payload_of(tensor, bucket_metadata(plan.buckets[0]))
    bucket = read(base64.b64decode(payload, validate=True))
    flat = bucket["flattened_tensor"].to(torch.uint8)
    rebuilt = {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in bucket["metadata"]}
    assert rebuilt["model.norm.weight"].shape == (5,) and rebuilt["model.norm.weight"].dtype == torch.float32
    assert rebuilt["model.layers.0.mlp.up_proj.weight"].shape == (3, 4)
    assert [m.numel for m in bucket["metadata"]] == [20, 24] and bucket["metadata"][1].end_idx == 44


def test_arguments_of_a_shared_tensor_are_torchs_own(monkeypatch: pytest.MonkeyPatch):
    """There is no GPU here: the storage's answer is made up, the order of arguments is checked against torch."""
    shared = (0, b"handle", 4096, 512, b"counter", 3, b"event", True)
    storage = SimpleNamespace(_share_cuda_=lambda: shared)
    flat = SimpleNamespace(
        device=torch.device("cuda", 0), shape=(100,), stride=lambda: (1,), storage_offset=lambda: 0,
        untyped_storage=lambda: storage, dtype=torch.uint8,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    made = shared_tensor(flat)  # pyright: ignore[reportArgumentType]
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    said = dict(zip(names, made.arguments, strict=True))
    assert said["tensor_size"] == (100,) and said["tensor_stride"] == (1,) and said["storage_device"] == "GPU-0"
    assert (said["storage_handle"], said["storage_size_bytes"], said["storage_offset_bytes"]) == (b"handle", 4096, 512)
    assert (said["ref_counter_handle"], said["ref_counter_offset"]) == (b"counter", 3)
    assert (said["event_handle"], said["event_sync_required"], said["requires_grad"]) == (b"event", True, False)
    assert said["storage_cls"] == Name("torch.storage", "TypedStorage") and said["dtype"] == Name("torch", "uint8")
    assert made.by == Name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
    assert hasattr(reductions, "rebuild_cuda_tensor") and hasattr(torch.storage.TypedStorage, "_new_shared_cuda")
    write_object(made)


def test_memory_of_the_host_is_not_shared():
    with pytest.raises(TrainError, match='"cuda_ipc" shares GPU memory'):
        shared_tensor(torch.zeros(4, dtype=torch.uint8))
