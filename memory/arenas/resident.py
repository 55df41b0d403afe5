"""What a process really holds, read from outside: pages of the device that the host's memory stands for, and pages of
its own. All in bytes; 0 for a process that is gone.

A device's pages are counted where they are made (the one memfd of each driver), not where they are seen: shared memory
of a process (RssShmem) also counts weight slabs that were never on the device, and the kernel keeps that number
loosely on machines with many cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...core.errors import MemoryFault
from .host_vmm import file_name

PROC = Path("/proc")


def rss_shmem(pid: int) -> int:
    """Shared pages that the process has in its page table: mapped chunks, and all other shared memory."""
    return _status(pid, "RssShmem:")


def rss_anon(pid: int) -> int:
    """Private pages: the host pool, and Python itself."""
    return _status(pid, "RssAnon:")


def device_bytes(pids: Iterable[int], device: str) -> int:
    """Pages of `device` that these processes have created, mapped or not; a file held by several counts once."""
    files: dict[int, int] = {}
    for pid in set(pids):
        files |= _device_files(pid, f"/memfd:{file_name(device)} (deleted)")
    return sum(files.values())


def _device_files(pid: int, wanted: str) -> dict[int, int]:
    files: dict[int, int] = {}
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed while we looked
                if str(link.readlink()) == wanted:
                    stat = link.stat()
                    files[stat.st_ino] = stat.st_blocks * 512
    except (FileNotFoundError, ProcessLookupError):
        return {}
    except PermissionError as error:
        raise MemoryFault(
            f"process {pid} belongs to somebody else, what it holds of a device cannot be seen",
            remedy="run all tenants of a device of the host as one user",
        ) from error
    return files


class HostDevice:
    """The measure of a device that is made of the host's memory: what a GPU's management library is for a GPU."""

    def __init__(self, device: str, capacity_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise MemoryFault(f"{device}: a capacity of {capacity_bytes} bytes", remedy="use a positive capacity")
        self.device = device
        self.capacity_bytes = capacity_bytes

    def used_bytes(self, pids: Iterable[int]) -> int:
        """By these processes, now."""
        return device_bytes(pids, self.device)

    def free_bytes(self, pids: Iterable[int]) -> int:
        """Capacity less what these processes hold; negative when they hold more than there is."""
        return self.capacity_bytes - self.used_bytes(pids)


def _status(pid: int, key: str) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
