"""torch-memory-saver's adapter, over a saver that is as strict as the library: where that ends the process, this fails.

The library itself needs a GPU's runtime to be loaded; the GPU benchmark runs the adapter with it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from myxa.core.clock import ManualClock
from myxa.core.errors import MemoryFault, OutOfDeviceMemory
from myxa.memory.arenas.torch_saver import TorchSaver

MIB = 1 << 20


class WouldExit(BaseException):
    """Where torch-memory-saver calls exit(1)."""


class StrictSaver:
    """0.0.10's rules: a tag is paused once, resumed once, in turn, and must have memory; modes are set before use."""

    def __init__(self, device: FakeDevice, wrong: Exception | None = None) -> None:
        self.device = device
        self.wrong = wrong
        self.tags: dict[str, tuple[int, bool]] = {}
        self.backups: dict[str, bool] = {}
        self.calls: list[str] = []

    def __setattr__(self, name: str, value: Any) -> None:
        wrong = self.__dict__.get("wrong")
        if name in ("hook_mode", "retain_cpu_backup") and wrong is not None:
            raise wrong
        super().__setattr__(name, value)

    @contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool):
        if self.tags.get(tag, (0, False))[1]:
            raise WouldExit("allocation while paused")
        self.backups[tag] = enable_cpu_backup
        before = self.device.reserved
        yield
        self.tags[tag] = (self.tags.get(tag, (0, False))[0] + self.device.reserved - before, False)

    def pause(self, tag: str) -> None:
        size, is_away = self.tags.get(tag, (0, False))
        if is_away or not size or not self.device.is_idle:
            raise WouldExit(f"pause of {tag}")
        self.tags[tag] = (size, True)
        self.device.free += size
        self.calls.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        size, is_away = self.tags.get(tag, (0, False))
        if not is_away or size > self.device.free:
            raise WouldExit(f"resume of {tag}")
        self.tags[tag] = (size, False)
        self.device.free -= size
        self.calls.append(f"resume {tag}")


class FakeDevice:
    def __init__(self) -> None:
        self.free, self.reserved, self.is_idle = 100 * MIB, 0, False

    def synchronise(self) -> None:
        self.is_idle = True

    def trim(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free

    def reserved_bytes(self) -> int:
        return self.reserved

    def allocate(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.free -= num_bytes


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def strict(device: FakeDevice) -> StrictSaver:
    return StrictSaver(device)


@pytest.fixture
def saver(device: FakeDevice, strict: StrictSaver) -> TorchSaver:
    saver = TorchSaver(ManualClock(), hook_mode="torch", saver=strict, device=device)  # type: ignore[arg-type]
    for tag, policy, size in (("params", "backup", 30 * MIB), ("grads", "discard", 20 * MIB)):
        with saver.region(tag, policy):  # type: ignore[arg-type]
            device.allocate(size)
    return saver


def backings(saver: TorchSaver) -> dict[str, str]:
    return {report.tag: report.backing for report in saver.report()}


def test_tags_go_and_come_by_their_policy(saver: TorchSaver, strict: StrictSaver, device: FakeDevice):
    assert strict.backups == {"params": True, "grads": False}
    moved = saver.release(("params", "grads"))
    assert (moved.copied_bytes, moved.dropped_bytes) == (30 * MIB, 20 * MIB)
    assert backings(saver) == {"params": "host", "grads": "discarded"}
    assert [report.host_bytes for report in saver.report()] == [30 * MIB, 0]
    assert device.free == 100 * MIB
    assert saver.restore(("grads", "params")).copied_bytes == 30 * MIB
    assert backings(saver) == {"params": "mapped_dirty", "grads": "mapped_dirty"}
    assert strict.calls == ["pause params", "pause grads", "resume grads", "resume params"]
    assert device.free == 50 * MIB


def test_no_call_that_would_end_the_process_is_made(saver: TorchSaver, strict: StrictSaver):
    saver.restore(("params",))
    saver.release(("params",))
    saver.release(("params", "params"))
    saver.tag("kv_cache", "discard")
    saver.release(("kv_cache",))  # nothing was ever allocated in it
    saver.restore(("kv_cache", "params"))
    saver.restore(("kv_cache", "params"))
    assert strict.calls == ["pause params", "resume params"]
    with pytest.raises(MemoryFault, match="tag 'weights' was not declared"):
        saver.release(("weights",))
    saver.release(("params",))
    with pytest.raises(MemoryFault, match="region of tag 'params', which is host"), saver.region("params", "backup"):
        pass
    saver.close()
    assert strict.calls[-1] == "resume params"
    assert saver.report() == ()


def test_a_resume_that_would_not_fit_is_refused_before_it_begins(saver: TorchSaver, strict: StrictSaver, device):
    saver.release(("params", "grads"))
    device.allocate(60 * MIB)
    with pytest.raises(OutOfDeviceMemory, match=r"params, grads take 52,428,800 bytes, 41,943,040 are free"):
        saver.restore(("params", "grads"))
    assert backings(saver) == {"params": "host", "grads": "discarded"}
    saver.restore(("params",))
    assert strict.calls[-1] == "resume params"


def test_what_is_kept_never_goes_through_the_library(saver: TorchSaver, strict: StrictSaver, device: FakeDevice):
    with saver.region("context", "keep"):
        device.allocate(MIB)
    assert "context" not in strict.tags
    with pytest.raises(MemoryFault, match="'context' is kept"):
        saver.release(("params", "context"))
    assert backings(saver)["params"] == "mapped_dirty"
    with pytest.raises(MemoryFault, match=r"tag 'params' holds 31,457,280 bytes under policy backup"):
        saver.tag("params", "discard")


def test_a_process_without_the_preload_is_told_how_to_begin(device: FakeDevice):
    class NotPreloaded(StrictSaver):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "retain_cpu_backup":
                raise AssertionError("TorchMemorySaver observes invalid LD_PRELOAD.")
            super().__setattr__(name, value)

    with pytest.raises(MemoryFault, match=r"mode 'preload': .*invalid LD_PRELOAD.*start the process with LD_PRELOAD"):
        TorchSaver(ManualClock(), hook_mode="preload", saver=NotPreloaded(device), device=device)  # type: ignore[arg-type]


def test_a_library_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, device: FakeDevice):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(MemoryFault, match=r"cannot be imported.*pip install torch-memory-saver"):
        TorchSaver(ManualClock(), device=device)
    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = strict = StrictSaver(device)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    TorchSaver(ManualClock(), device=device, is_retaining=True)
    assert (strict.hook_mode, strict.retain_cpu_backup) == ("torch", True)  # type: ignore[attr-defined]
