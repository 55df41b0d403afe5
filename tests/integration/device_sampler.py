"""What the actors of a run really hold of devices that are made of the host's memory, looked at while it goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import psutil
from tests.harness.run_job import worker_pids

from myxa.core.errors import MemoryFault
from myxa.memory.arenas.host_vmm import device_bytes

LOOK_S = 0.1
"""A look that took longer tells nothing of all together: memory may have gone to another actor and back meanwhile."""


@dataclass
class Sampler:
    launcher_pid: int
    trainers: tuple[str, ...] = ("trainer/0",)
    rollouts: tuple[str, ...] = ("rollout/0",)
    devices: tuple[str, ...] = ("host:0",)
    highest: dict[str, int] = field(default_factory=dict, init=False)
    """Of each device, all actors together."""
    seen: dict[str, int] = field(default_factory=dict, init=False)
    """Of each actor, on the device that it used most of; "rollout/0 host:1" on that one."""
    num_looks: int = field(default=0, init=False)

    def __enter__(self) -> Sampler:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look_forever)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(20)

    def _look_forever(self) -> None:
        pids: dict[str, int] = {}
        while not self._ends.wait(0.02):
            for name in (*self.trainers, *self.rollouts):
                if name not in pids and (found := _pids(self.launcher_pid, name)):
                    pids[name] = found[-1]
            if len(pids) == len(self.trainers) + len(self.rollouts):
                for device in self.devices:
                    self._look(device, pids)

    def _look(self, device: str, pids: dict[str, int]) -> None:
        begun_s = time.monotonic()
        try:
            first, again = ({name: device_bytes([pid], device) for name, pid in pids.items()} for _ in range(2))
        except (OSError, MemoryFault):  # a process that ends between two looks
            return
        if first == again and time.monotonic() - begun_s < LOOK_S:
            self.num_looks += 1
            self.highest[device] = max(self.highest.get(device, 0), sum(first.values()))
        for name, num_bytes in (*first.items(), *again.items()):
            for key in (name, f"{name} {device}"):
                self.seen[key] = max(self.seen.get(key, 0), num_bytes)


def _pids(launcher_pid: int, name: str) -> list[int]:
    try:
        return worker_pids(launcher_pid, name)
    except psutil.Error:  # the launcher has ended
        return []
