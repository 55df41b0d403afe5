"""Python, system, memory, limits, rights, clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ..memory_part import GIB, size_text
from .check import Judge, MachineCheck, error, ok, warning
from .machine_facts import MachineFacts

OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 3)
"""pidfd_open."""
WHEEL_GLIBC = (2, 34)
"""SGLang from 0.5.11 on publishes only manylinux_2_34 wheels."""
FEW_FILES = 1024
ENOUGH_FILES = 4096
SMALL_SHM = 1 * GIB
"""NCCL's and torch's own shared memory; myxa's is anonymous and counts as memory."""
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK = 5 * GIB
NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs", "ceph"})
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "refined-jiffies", "jiffies"})
CLOCK_SLACK_S = 86400.0


def python(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Old enough for nothing else to be said."""
    version = ".".join(map(str, facts.system.python))
    if facts.system.python[:2] < OLDEST_PYTHON:
        yield error("python", f"{version} at {facts.system.executable}", "use Python 3.11 or later")
        return
    note = "" if facts.system.python[:2] >= (3, 12) else "; megatron-core from 0.17 on needs 3.12"
    yield ok("python", f"{version} at {facts.system.executable}{note}")


def operating_system(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Kernel and C library, with the system's own words."""
    system = facts.system
    kernel = ".".join(map(str, system.kernel))
    text = f"{system.os_name}, kernel {kernel}, {system.libc}, {system.machine}"
    if system.kernel < OLDEST_KERNEL:
        yield error("system", text, "use Linux 5.3 or later: processes are watched by pidfd")
    elif system.libc.startswith("glibc") and _version(system.libc.partition(" ")[2]) < WHEEL_GLIBC:
        yield warning(
            "system",
            text,
            "SGLang's wheels need glibc 2.34: use Ubuntu 22.04, Debian 12, RHEL 9 or later for it",
        )
    elif not system.libc.startswith("glibc"):
        yield warning("system", text, "torch and SGLang publish wheels for glibc only: use a system with glibc")
    else:
        yield ok("system", text)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def memory(facts: MachineFacts) -> Iterator[MachineCheck]:
    """The tighter of machine and control group."""
    room = facts.room
    limit = room.cgroup_bytes
    text = f"{size_text(room.available_bytes)} available of {size_text(room.total_bytes)}"
    if limit is not None and limit < room.total_bytes:
        text = f"{text}, but the control group allows {size_text(limit)}: that counts, not MemTotal"
    if room.available_bytes < LITTLE_MEMORY:
        yield warning("memory", text, "close other programs, or raise the container's memory limit")
    else:
        yield ok("memory", text)
    if room.overcommit == 2:
        yield warning(
            "overcommit",
            "vm.overcommit_memory = 2: reserving addresses counts as memory, and arenas reserve many",
            "sysctl vm.overcommit_memory=0",
        )


def shared_memory(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Containers give 64 MiB by default."""
    size = facts.room.shm_bytes
    if size is None:
        yield warning("/dev/shm", "there is none", "mount a tmpfs there: NCCL and torch need it with several GPUs")
    elif size < SMALL_SHM:
        yield warning(
            "/dev/shm",
            f"{size_text(size)}: NCCL between GPUs of one host needs more",
            "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory",
        )
    else:
        yield ok("/dev/shm", size_text(size))


def open_files(facts: MachineFacts) -> Iterator[MachineCheck]:
    """A ZeroMQ without descriptors ends its process."""
    soft, hard = facts.room.num_files
    text = f"{soft} open files, {hard} at most (launchers raise it themselves)"
    if 0 <= hard < FEW_FILES:
        yield error("open files", text, "ulimit -Hn 65536; LimitNOFILE= of a unit; docker run --ulimit nofile=65536")
    elif 0 <= hard < ENOUGH_FILES:
        yield warning("open files", text, "raise the hard limit to 65536 for runs with many actors")
    else:
        yield ok("open files", text)


def disk(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Where run directories are made."""
    found = facts.disk
    free = size_text(found.free_bytes) if found.free_bytes is not None else "an unknown number of bytes"
    text = f"{free} free at {found.folder}" + (f" ({found.file_system})" if found.file_system else "")
    if not found.is_writable:
        yield error("disk", f"{found.folder} cannot be written to", "go to a folder of yours, or set run.dir")
    elif found.free_bytes is not None and found.free_bytes < LITTLE_DISK:
        yield warning("disk", text, "set run.dir to another disk; `myxa plan RUN.TOML` says how much a run writes")
    elif found.file_system in NETWORK_DISKS:
        yield warning(
            "disk",
            f"{text}: SQLite's ledger is slow there, and locks of some network file systems do not hold",
            "set run.dir to a local disk of node 0",
        )
    else:
        yield ok("disk", text)


def rights(facts: MachineFacts) -> Iterator[MachineCheck]:
    """What the kernel, a container or a security module may forbid."""
    found = facts.rights
    scope = "" if found.ptrace_scope is None else f" (yama ptrace_scope {found.ptrace_scope})"
    if found.read_memory:
        yield warning(
            "process_vm_readv",
            f"{found.read_memory}{scope}: large arrays go by shared memory or the wire",
            "docker run --cap-add SYS_PTRACE, or a seccomp profile that allows process_vm_readv",
        )
    else:
        yield ok("process_vm_readv", f"works between relatives{scope}")
    if found.ptrace_scope is not None and found.ptrace_scope > 1:
        yield warning(
            "ptrace",
            f"yama ptrace_scope = {found.ptrace_scope}: stacks of an actor cannot be taken from outside",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    wider = "use a newer kernel, or a wider seccomp profile"
    for name, trouble, what, remedy in (
        ("memfd_create", found.memfd, "shared memory and stand-in devices need it", wider),
        ("pidfd_open", found.pidfd, "actors are watched by it", wider),
        ("sockets", found.socket_folder, "launchers keep sockets there", "set TMPDIR to a short path that is writable"),
    ):
        yield error(name, f"{trouble}: {what}", remedy) if trouble else ok(name, "works")


def clocks(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Waits go by the monotonic clock; names of run directories, logs and TLS by the wall clock."""
    if facts.time.wall_s + CLOCK_SLACK_S < facts.time.newest_file_s:
        yield warning(
            "clock",
            "the wall clock is behind the files of this installation",
            "set the clock (timedatectl set-ntp true): run directories are named by it",
        )
    elif facts.time.source in SLOW_CLOCKS:
        yield warning(
            "clock",
            f"the kernel's clock source is {facts.time.source}: asking the time is slow",
            "use tsc or kvm-clock (/sys/devices/system/clocksource)",
        )
    else:
        yield ok("clock", facts.time.source or "set")


JUDGES: tuple[Judge, ...] = (
    python, operating_system, memory, shared_memory, open_files, disk, rights, clocks,
)  # fmt: skip
