"""The page of `myxa mem`, from a view."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from myxa.core.device_memory import OPTIMIZER_PARTS, DeviceView, MemoryView, TagReport, TenantReport, TenantState
from myxa.launch.commands.views import memory_page

GIB = 1 << 30


def tenant(name: str, gang: str, state: TenantState, *tags: TagReport) -> TenantReport:
    return TenantReport(
        tenant=name, epoch=1, gang=gang, devices=("GPU-1",), pids=(7,), state=state, tags=tags,
    )  # fmt: skip


def view(**changes: object) -> MemoryView:
    trainer = tenant(
        "trainer/0",
        "trainer",
        "quiet",
        TagReport("optimizer", 24 * GIB, "backup", "host", host_bytes=24 * GIB),
        TagReport("params", 2 * GIB, "backup", "mapped_clean", host_bytes=2 * GIB),
        TagReport("grads", 8 * GIB, "discard", "discarded"),
    )
    engine = tenant("rollout/0", "rollout", "active", TagReport("kv_cache", 100 * GIB, "discard", "mapped_dirty"))
    device = DeviceView("GPU-1", 140 * GIB, 30 * GIB, GIB // 4, (trainer, engine))
    facts: dict[str, object] = {
        "manager": "memory/0", "epoch": 12, "switching": "", "devices": (device,),
        "timeline": ((1000.0, "GPU-1", "trainer/0", "drain: 3 ms"),),
    }  # fmt: skip
    return MemoryView(**(facts | changes))  # pyright: ignore[reportArgumentType]


def lines_of(view: MemoryView) -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(memory_page(msgspec.to_builtins(view)))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_every_tag_is_said_with_where_it_is() -> None:
    lines = lines_of(view())
    assert lines[0] == "memory/0, epoch 12: nothing is being switched"
    assert "GPU-1: 140.0 GiB, free 30.0 GiB, unattributed 256.0 MiB" in lines
    assert "trainer/0 (trainer) quiet optimizer 24.0 GiB on the host backup 24.0 GiB" in lines
    assert "trainer/0 (trainer) quiet params 2.0 GiB on the device, copy kept backup 2.0 GiB" in lines
    assert "trainer/0 (trainer) quiet grads 8.0 GiB dropped discard" in lines
    assert "rollout/0 (rollout) active kv_cache 100.0 GiB on the device discard" in lines
    assert lines[-1].endswith("GPU-1 trainer/0 drain: 3 ms")


def test_parts_of_a_tag_are_told_by_where_they_are() -> None:
    parts = [TagReport(part, GIB, "backup", "mapped_dirty") for part in OPTIMIZER_PARTS[:6]]
    parts += [TagReport(part, GIB, "backup", "host", host_bytes=GIB) for part in OPTIMIZER_PARTS[6:]]
    device = DeviceView("GPU-1", 140 * GIB, 30 * GIB, 0, (tenant("trainer/0", "trainer", "quiet", *parts),))
    lines = lines_of(view(devices=(device,)))
    assert [line.partition("quiet ")[2] for line in lines if "optimizer" in line] == [
        "optimizer 6.0 GiB on the device backup", "optimizer 2.0 GiB on the host backup 2.0 GiB",
    ]  # fmt: skip


def test_a_switch_under_way_and_a_bounded_timeline() -> None:
    events = tuple((float(second), "GPU-1", "", f"event {second}") for second in range(50))
    text = "\n".join(lines_of(view(switching="trainer: params", timeline=events)))
    assert "switching: trainer: params" in text
    assert "event 49" in text
    assert "event 29" not in text
