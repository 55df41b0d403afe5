"""The memory manager's process in the switching benchmark."""

from __future__ import annotations

import argparse

from memory_figures import GIB, MIB
from memory_process import run

from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager, NodeAgent
from myxa.memory.leases.switch import LeaseOptions

NUM_HOST_DEVICES = 8


def build(options: argparse.Namespace) -> MemoryManager:
    capacities = {f"host:{index}": options.capacity_mib * MIB for index in range(NUM_HOST_DEVICES)}
    gangs = {gang: [f"{gang}/{number}" for number in range(options.gpus)] for gang in ("trainer", "rollout")}
    is_cuda = options.device == "cuda"
    limits = LeaseOptions(reserve_bytes=GIB if is_cuda else 0, margin_bytes=64 * MIB if is_cuda else MIB)
    return MemoryManager(
        agent=NodeAgent({} if is_cuda else capacities),
        options=ManagerOptions(gangs=gangs, limits=limits),
    )


if __name__ == "__main__":
    run(__doc__, build)
