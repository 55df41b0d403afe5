"""Judges a machine by its `MachineFacts`, and renders the checks as a page or as JSON. Pure.

A judge is a function from the facts to checks (`ok`, `warning`, `error`), each with a remedy. Versions that belong
together follow the exact pins in the packages' own metadata: an SGLang is built for one torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ..memory_part import GIB, size_text
from .machine_facts import MachineFacts

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The result of one check."""

    name: str
    status: Status
    found: str
    """What is there, and what that means."""
    remedy: str = ""
    """What to do; of an "ok" there is none."""


Judge = Callable[[MachineFacts], Iterator[MachineCheck]]


def ok(name: str, found: str) -> MachineCheck:
    """Nothing to do."""
    return MachineCheck(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> MachineCheck:
    """Works, or will for some runs."""
    return MachineCheck(name, "warning", found, remedy)


def error(name: str, found: str, remedy: str) -> MachineCheck:
    """No run, or none of the kind that the installed packages are for, will work."""
    return MachineCheck(name, "error", found, remedy)


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
    """The interpreter's version."""
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


SYSTEM: tuple[Judge, ...] = (
    python, operating_system, memory, shared_memory, open_files, disk, rights, clocks,
)  # fmt: skip


TORCH_OF_SGLANG: tuple[tuple[tuple[int, ...], str], ...] = (
    ((0, 5, 22), "2.14.1"),
    ((0, 5, 18), "2.13.0"),
    ((0, 5, 11), "2.11.0"),
)
"""From that SGLang on, this torch, newest first."""
OLDEST_SGLANG = (0, 5, 17)
"""With token ids on every reply."""
OLDEST_MEGATRON = (0, 16)
MEGATRON_PYTHON = ((0, 17), (3, 12))
"""From that megatron-core on, this Python."""
DRIVER_OF_CUDA: Mapping[int, int] = MappingProxyType({13: 580, 12: 525})
"""CUDA's major version -> oldest driver."""
SHOWN = ("torch", "sglang", "megatron-core", "torch-memory-saver", "transformers", "flashinfer-python", "nvidia-ml-py")


def parts(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.11.0+cu130" -> (2, 11, 0)."""
    numbers: list[int] = []
    for piece in version.partition("+")[0].split("."):
        digits = "".join(char for char in piece if char.isdigit()) if piece[:1].isdigit() else ""
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def installed(facts: MachineFacts) -> Iterator[MachineCheck]:
    """The installed packages with their versions."""
    versions = facts.packages.versions
    there = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    if "torch" not in versions:
        yield warning(
            "packages",
            ", ".join(there) or "no torch: no trainer and no embedded engine can run in this interpreter",
            "install an extra: pip install 'myxa[cpu]' or 'myxa[gpu]'; or set roles.<role>.python to one that has it",
        )
    else:
        yield ok("packages", ", ".join(there))


def sglang(facts: MachineFacts) -> Iterator[MachineCheck]:
    """One torch for each SGLang."""
    versions = facts.packages.versions
    have = versions.get("sglang")
    if have is None:
        return
    if parts(have) < OLDEST_SGLANG:
        yield error("sglang", f"{have}: myxa needs token ids on every reply", "install SGLang 0.5.17 or later")
        return
    wanted = next((torch for first, torch in TORCH_OF_SGLANG if parts(have) >= first), "")
    torch = versions.get("torch", "")
    if wanted and torch and parts(torch) != parts(wanted):
        yield error(
            "sglang",
            f"sglang {have} is built for torch {wanted}, here is torch {torch}",
            "give SGLang its own environment and name its interpreter in engine.python",
        )
    else:
        yield ok("sglang", f"{have} with torch {torch or 'of another environment'}")


def megatron(facts: MachineFacts) -> Iterator[MachineCheck]:
    """megatron-core and Python."""
    have = facts.packages.versions.get("megatron-core")
    if have is None:
        return
    if parts(have) < OLDEST_MEGATRON:
        yield error("megatron-core", have, "install megatron-core 0.16 or later")
    elif parts(have) >= MEGATRON_PYTHON[0] and facts.system.python[:2] < MEGATRON_PYTHON[1]:
        yield error("megatron-core", f"{have} needs Python 3.12", "use Python 3.12, or megatron-core 0.16.1")
    else:
        yield ok("megatron-core", have)


def driver(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Torch's CUDA against the driver's."""
    gpus, built = facts.gpus, facts.packages.torch_cuda
    names = f"{len(gpus.found)} x {gpus.found[0].name}" if gpus.found else "none"
    if not gpus.source:
        if built:
            yield warning(
                "gpu",
                f"torch is built for CUDA {built}, and no driver can be seen ({gpus.trouble})",
                "fine on a machine without GPUs; else pip install nvidia-ml-py and see nvidia-smi",
            )
        else:
            yield ok("gpu", "none: runs on the CPU")
        return
    text = f"{names}, driver {gpus.driver or 'unknown'} (by {gpus.source})"
    major = parts(built or "")[:1]
    oldest = DRIVER_OF_CUDA.get(major[0]) if major else None
    have = parts(gpus.driver)[:1]
    if oldest and have and have[0] < oldest:
        yield error(
            "gpu",
            f"{text}, torch is built for CUDA {built}, which needs driver r{oldest} or later",
            f"update the driver, or install a torch for CUDA {'12' if oldest == 580 else '11'}",
        )
    elif built == "" and gpus.found:
        yield warning("gpu", f"{text}, but torch is built without CUDA", "install torch's wheel for CUDA")
    else:
        yield ok("gpu", text)
    if "nvidia-ml-py" not in facts.packages.versions and gpus.found:
        yield warning(
            "nvml", "nvidia-ml-py is not installed", 'pip install nvidia-ml-py: memory.share = "switch" needs it'
        )


def preload(facts: MachineFacts) -> Iterator[MachineCheck]:
    """A preload whose own libraries are missing ends the process before Python starts."""
    found = facts.preload
    version = facts.packages.versions.get("torch-memory-saver")
    if version is None:
        return
    name = "torch-memory-saver"
    remedy = "put the folder of libcudart (<site-packages>/nvidia/cu13/lib) first in LD_LIBRARY_PATH of the role's env"
    if not found.library:
        yield warning(name, f"{version}: {found.trouble}", "install a torch for CUDA there, or leave it out")
    elif "libcuda.so" in found.said and not facts.gpus.source:
        text = f"{version}, its library needs the driver (libcuda.so.1), and there is none here"
        yield warning(name, text, "fine on a machine without GPUs; else install the driver")
    elif found.status != 0:
        yield error(
            name, f"/bin/true with LD_PRELOAD={found.library} ended with status {found.status}: {found.said}", remedy
        )
    elif found.said:  # the loader warns and continues without it: nothing could be paused
        yield error(name, f"{found.library} is not loaded: {found.said}", remedy)
    else:
        yield ok(name, f"{version}, {found.library} loads")


def communicators(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Whether a gang's communicators can leave a device."""
    if len(facts.gpus.found) < 2 or "torch" not in facts.packages.versions:
        return
    if facts.packages.compiler:
        yield ok("communicators", f"reloaded by a proxy that {facts.packages.compiler} compiles once")
    else:
        yield warning(
            "communicators",
            "there is no C++ compiler to build the proxy that reloads them",
            'install g++: with memory.share = "switch" they would stay on the device (0.65 GiB each)',
        )


def environment(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Variables that are inherited by every actor."""
    env = facts.env
    cumem = env.get("NCCL_CUMEM_ENABLE", "")
    if cumem not in ("", "0"):
        yield warning(
            "NCCL_CUMEM_ENABLE",
            f"= {cumem} here; SGLang's servers set it to 0, and members of a group must agree",
            "unset it, or set it alike for trainer and engines (roles.*.env)",
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower():
            yield warning(
                name,
                "expandable_segments is on: torch-memory-saver refuses it, arenas do without",
                'unset it for runs with memory.share = "switch"',
            )
    if env.get("LD_PRELOAD"):
        yield warning("LD_PRELOAD", f"= {env['LD_PRELOAD']}: every actor loads it", "unset it unless you mean it")
    if "CUDA_VISIBLE_DEVICES" in env:
        yield warning(
            "CUDA_VISIBLE_DEVICES",
            f"= {env['CUDA_VISIBLE_DEVICES']!r}: actors get the GPUs of roles.*.devices, "
            "numbered as nvidia-smi does, whatever it says",
            "unset it, and name the GPUs in the run file",
        )


PACKAGES: tuple[Judge, ...] = (installed, sglang, megatron, driver, preload, communicators, environment)


LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost", "::1"})


def hostname(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Other nodes use this name."""
    net = facts.network
    if net.trouble:
        yield warning(
            "hostname",
            f"{net.hostname} does not resolve: {net.trouble}",
            "add it to /etc/hosts with the address that other nodes reach; one machine alone does without",
        )
    elif net.addresses and all(address.startswith("127.") or address == "::1" for address in net.addresses):
        yield warning(
            "hostname",
            f"{net.hostname} resolves to {', '.join(net.addresses)}: other nodes would call themselves",
            "give it its real address in /etc/hosts, or name an address: --rdzv ADDRESS:PORT",
        )
    else:
        yield ok("hostname", f"{net.hostname} is {', '.join(net.addresses)}")


def ports(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Can anything be listened on?"""
    net = facts.network
    if net.loopback:
        yield error("ports", f"127.0.0.1: {net.loopback}", "bring the loopback interface up (ip link set lo up)")
    elif net.every_address:
        yield warning("ports", f"0.0.0.0: {net.every_address}", "one machine alone does without; several need it")
    else:
        yield ok("ports", "127.0.0.1 and 0.0.0.0 can be listened on")
    if net.meeting_port:
        yield warning(
            "port 29400",
            f"{net.meeting_port}: `myxa launch` meets there by default",
            "end what listens there (ss -ltnp), or give another one: --rdzv HOST:PORT",
        )
    if net.ipv6:
        yield ok("ipv6", f"not here ({net.ipv6}); addresses like [::1]:29400 will not work, nothing needs them")
    else:
        yield ok("ipv6", "works")


def runs(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Runs of this user on this host: those that are running, and what ended ones left."""
    alive = [run for run in facts.runs if run.is_alive]
    left = [run for run in facts.runs if not run.is_alive]
    if alive:
        names = ", ".join(run.run_dir for run in alive)
        yield ok("runs", f"{len(alive)} go{'es' if len(alive) == 1 else ''} on: {names}")
    for run in left:
        if run.pids:
            pids = " ".join(map(str, run.pids))
            yield warning(
                "leftovers",
                f"actors of {run.run_dir or run.folder} are there without their launcher: {pids}",
                f"they end by themselves within seconds; else: kill {pids}",
            )
        else:
            yield warning(
                "leftovers",
                f"{run.folder} was left by the run {run.run_dir or 'of a launcher that was killed'}",
                f"rm -r {run.folder}",
            )
    if not facts.runs:
        yield ok("leftovers", "none of earlier runs")


def servers(facts: MachineFacts) -> Iterator[MachineCheck]:
    """An SGLang server without a key takes weights from every client that reaches it."""
    for server in facts.servers:
        if server.has_key and server.host in LOCAL_HOSTS:
            continue
        name = f"sglang {server.pid}"
        if not server.has_key and server.host not in LOCAL_HOSTS:
            yield error(
                name,
                f"listens on {server.host} without a key: every client that reaches it can load weights and stop it",
                "start it with --admin-api-key and --host 127.0.0.1, and name the key in engine.key_env",
            )
        elif not server.has_key:
            yield warning(
                name,
                "has no key: every user of this host can load weights",
                "start it with --admin-api-key, and name the key in engine.key_env",
            )
        else:
            yield warning(
                name,
                f"listens on {server.host}: its key travels in the clear",
                "start it with --host 127.0.0.1, or keep it in a private network",
            )


SURROUNDINGS: tuple[Judge, ...] = (hostname, ports, runs, servers)


JUDGES: tuple[Judge, ...] = (*SYSTEM, *PACKAGES, *SURROUNDINGS)
MARKS = {"ok": "ok  ", "warning": "warn", "error": "FAIL"}


def judge(facts: MachineFacts) -> tuple[MachineCheck, ...]:
    """Every check."""
    return tuple(check for one in JUDGES for check in one(facts))


def checks_json(checks: Sequence[MachineCheck]) -> dict[str, Any]:
    """For programs."""
    return {
        "ok": not any(check.status == "error" for check in checks),
        "checks": [
            {"name": check.name, "status": check.status, "found": check.found, "remedy": check.remedy}
            for check in checks
        ],
    }


def checks_text(checks: Sequence[MachineCheck]) -> str:
    """The page: one line a check, what to do below it."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{MARKS[check.status]}  {check.name.ljust(width)}  {check.found}")
        if check.remedy:
            lines.append(f"      {' ' * width}  -> {check.remedy}")
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    lines.append(f"{counts['ok']} ok, {counts['warning']} to look at, {counts['error']} to mend")
    return "\n".join(lines)
