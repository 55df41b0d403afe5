"""The checks of a machine, for `myxa doctor`. Pure: they judge `MachineFacts`.

Versions that belong together follow the exact pins in the packages' own metadata: an SGLang is built for one torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ...core.errors import MyxaError
from ..memory_part import GIB, size_text
from .check import Finding, Severity
from .machine import MachineFacts

Case = tuple[object, Severity, str, str]
"""Condition, severity, what it means (added to what is there), what to do."""


def first(name: str, text: str, *cases: Case) -> Iterator[Finding]:
    """The first case that holds; without one, all is well with what is there."""
    for holds, severity, meaning, remedy in cases:
        if holds:
            yield Finding(name, MyxaError(f"{text}{meaning}", remedy=remedy), severity)
            return
    yield Finding(name, MyxaError(text), "ok")


def if_so(name: str, *cases: Case) -> Iterator[Finding]:
    """The first case that holds, or nothing."""
    return first(name, "", *cases) if any(case[0] for case in cases) else iter(())


OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 3)
"""pidfd_open."""
WHEEL_GLIBC = (2, 34)
"""SGLang from 0.5.11 on publishes only manylinux_2_34 wheels."""
FEW_FILES = 1024
"""A ZeroMQ without descriptors ends its process."""
ENOUGH_FILES = 4096
SMALL_SHM = 1 * GIB
"""NCCL's and torch's own shared memory; myxa's is anonymous and counts as memory."""
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK = 5 * GIB
NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs", "ceph"})
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "refined-jiffies", "jiffies"})
CLOCK_SLACK_S = 86400.0


def python(facts: MachineFacts) -> Iterator[Finding]:
    is_old = facts.python[:2] < OLDEST_PYTHON
    note = "" if is_old or facts.python[:2] >= (3, 12) else "; megatron-core from 0.17 on needs 3.12"
    text = f"{'.'.join(map(str, facts.python))} at {facts.executable}{note}"
    return first("python", text, (is_old, "error", "", "use Python 3.11 or later"))


def operating_system(facts: MachineFacts) -> Iterator[Finding]:
    is_glibc = facts.libc.startswith("glibc")
    glibc = numbers(facts.libc.partition(" ")[2])
    return first(
        "system",
        f"{facts.os_name}, kernel {'.'.join(map(str, facts.kernel))}, {facts.libc}, {facts.architecture}",
        (facts.kernel < OLDEST_KERNEL, "error", "", "use Linux 5.3 or later: processes are watched by pidfd"),
        (is_glibc and glibc < WHEEL_GLIBC, "warning", "",
         "SGLang's wheels need glibc 2.34: use Ubuntu 22.04, Debian 12, RHEL 9 or later for it"),
        (not is_glibc, "warning", "", "torch and SGLang publish wheels for glibc only: use a system with glibc"),
    )  # fmt: skip


def memory(facts: MachineFacts) -> Iterator[Finding]:
    text = f"{size_text(facts.available_bytes)} available of {size_text(facts.total_bytes)}"
    if facts.cgroup_bytes is not None and facts.cgroup_bytes < facts.total_bytes:
        text += f", but the control group allows {size_text(facts.cgroup_bytes)}: that counts, not MemTotal"
    is_little = facts.available_bytes < LITTLE_MEMORY
    yield from first(
        "memory", text, (is_little, "warning", "", "close other programs, or raise the container's memory limit")
    )
    meaning = "vm.overcommit_memory = 2: reserving addresses counts as memory, and arenas reserve many"
    yield from if_so("overcommit", (facts.overcommit == 2, "warning", meaning, "sysctl vm.overcommit_memory=0"))


def shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    size = facts.shm_bytes
    return first(
        "/dev/shm",
        "there is none" if size is None else size_text(size),
        (size is None, "warning", "", "mount a tmpfs there: NCCL and torch need it with several GPUs"),
        (size is not None and size < SMALL_SHM, "warning", ": NCCL between GPUs of one host needs more",
         "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory"),
    )  # fmt: skip


def open_files(facts: MachineFacts) -> Iterator[Finding]:
    soft, hard = facts.num_files
    return first(
        "open files",
        f"{soft} open files, {hard} at most (launchers raise it themselves)",
        (0 <= hard < FEW_FILES, "error", "",
         "ulimit -Hn 65536; LimitNOFILE= of a unit; docker run --ulimit nofile=65536"),
        (0 <= hard < ENOUGH_FILES, "warning", "", "raise the hard limit to 65536 for runs with many actors"),
    )  # fmt: skip


def disk(facts: MachineFacts) -> Iterator[Finding]:
    free = size_text(facts.free_bytes) if facts.free_bytes is not None else "an unknown number of bytes"
    kind = f" ({facts.file_system})" if facts.file_system else ""
    return first(
        "disk",
        f"{free} free at {facts.folder}{kind}" if facts.is_writable else f"{facts.folder} cannot be written to",
        (not facts.is_writable, "error", "", "go to a folder of yours, or set run.dir"),
        (facts.free_bytes is not None and facts.free_bytes < LITTLE_DISK, "warning", "",
         "set run.dir to another disk; `myxa plan RUN.TOML` says how much a run writes"),
        (facts.file_system in NETWORK_DISKS, "warning",
         ": SQLite's ledger is slow there, and locks of some network file systems do not hold",
         "set run.dir to a local disk of node 0"),
    )  # fmt: skip


def rights(facts: MachineFacts) -> Iterator[Finding]:
    scope = facts.ptrace_scope
    meaning = f"yama ptrace_scope = {scope}: stacks of an actor cannot be taken from outside"
    is_strict = scope is not None and scope > 1
    yield from if_so("ptrace", (is_strict, "warning", meaning, "sysctl kernel.yama.ptrace_scope=1"))
    wider = "use a newer kernel, or a wider seccomp profile"
    for name, trouble, what, remedy in (
        ("memfd_create", facts.memfd_trouble, "shared memory and stand-in devices need it", wider),
        ("pidfd_open", facts.pidfd_trouble, "actors are watched by it", wider),
        (
            "sockets",
            facts.socket_trouble,
            "launchers keep sockets there",
            "set TMPDIR to a short path that is writable",
        ),
    ):
        yield from first(name, trouble or "works", (trouble, "error", f": {what}", remedy))


def clock(facts: MachineFacts) -> Iterator[Finding]:
    """Waits go by the monotonic clock; names of run directories, logs and TLS by the wall clock."""
    is_behind = facts.wall_s + CLOCK_SLACK_S < facts.newest_file_s
    if is_behind:
        text = "the wall clock is behind the files of this installation"
    elif facts.clock_source in SLOW_CLOCKS:
        text = f"the kernel's clock source is {facts.clock_source}: asking the time is slow"
    else:
        text = facts.clock_source or "set"
    return first(
        "clock",
        text,
        (is_behind, "warning", "", "set the clock (timedatectl set-ntp true): run directories are named by it"),
        (facts.clock_source in SLOW_CLOCKS, "warning", "",
         "use tsc or kvm-clock (/sys/devices/system/clocksource)"),
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


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.11.0+cu130" -> (2, 11, 0)."""
    found: list[int] = []
    for piece in version.partition("+")[0].split("."):
        digits = "".join(char for char in piece if char.isdigit()) if piece[:1].isdigit() else ""
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def packages(facts: MachineFacts) -> Iterator[Finding]:
    there = ", ".join(f"{name} {facts.versions[name]}" for name in SHOWN if name in facts.versions)
    return first(
        "packages",
        there or "no torch: no trainer and no embedded engine can run in this interpreter",
        ("torch" not in facts.versions, "warning", "",
         "install an extra: pip install 'myxa[cpu]' or 'myxa[gpu]'; or set roles.<role>.python to one that has it"),
    )  # fmt: skip


def sglang(facts: MachineFacts) -> Iterator[Finding]:
    have, torch = facts.versions.get("sglang"), facts.versions.get("torch", "")
    if have is None:
        return
    wanted = next((torch for since, torch in TORCH_OF_SGLANG if numbers(have) >= since), "")
    is_old = numbers(have) < OLDEST_SGLANG
    is_other = wanted and torch and numbers(torch) != numbers(wanted)
    if is_other and not is_old:
        text = f"sglang {have} is built for torch {wanted}, here is torch {torch}"
    else:
        text = f"{have}: myxa needs token ids on every reply" if is_old else f"{have} with torch {torch or 'elsewhere'}"
    yield from first(
        "sglang",
        text,
        (is_old, "error", "", "install SGLang 0.5.17 or later"),
        (is_other, "error", "", "give SGLang its own environment and name its interpreter in engine.python"),
    )


def megatron(facts: MachineFacts) -> Iterator[Finding]:
    have = facts.versions.get("megatron-core")
    if have is not None:
        needs_newer = numbers(have) >= MEGATRON_PYTHON[0] and facts.python[:2] < MEGATRON_PYTHON[1]
        yield from first(
            "megatron-core",
            have,
            (numbers(have) < OLDEST_MEGATRON, "error", "", "install megatron-core 0.16 or later"),
            (needs_newer, "error", " needs Python 3.12", "use Python 3.12, or megatron-core 0.16.1"),
        )


def gpu(facts: MachineFacts) -> Iterator[Finding]:
    """Torch's CUDA against the driver's."""
    gpus, built = facts.gpus, facts.torch_cuda
    if not gpus.source:
        text = f"torch is built for CUDA {built}, and no driver can be seen ({gpus.trouble})"
        remedy = "fine on a machine without GPUs; else pip install nvidia-ml-py and see nvidia-smi"
        yield from first("gpu", text if built else "none: runs on the CPU", (built, "warning", "", remedy))
        return
    names = f"{len(gpus.found)} x {gpus.found[0].name}" if gpus.found else "none"
    oldest = DRIVER_OF_CUDA.get(next(iter(numbers(built or "")), 0), 0)
    have = next(iter(numbers(gpus.driver)), oldest)
    yield from first(
        "gpu",
        f"{names}, driver {gpus.driver or 'unknown'} (by {gpus.source})",
        (have < oldest, "error", f", torch is built for CUDA {built}, which needs driver r{oldest} or later",
         f"update the driver, or install a torch for CUDA {'12' if oldest == 580 else '11'}"),
        (built == "" and gpus.found, "warning", ", but torch is built without CUDA", "install torch's wheel for CUDA"),
    )  # fmt: skip
    yield from if_so(
        "nvml",
        ("nvidia-ml-py" not in facts.versions and gpus.found, "warning", "nvidia-ml-py is not installed",
         'pip install nvidia-ml-py: memory.share = "switch" needs it'),
    )  # fmt: skip


def preload(facts: MachineFacts) -> Iterator[Finding]:
    """A preload whose own libraries are missing ends the process before Python starts; where the loader only warns,
    nothing could be paused."""
    found, version = facts.preload, facts.versions.get("torch-memory-saver")
    if version is None:
        return
    remedy = "put the folder of libcudart (<site-packages>/nvidia/cu13/lib) first in LD_LIBRARY_PATH of the role's env"
    lacks_driver = "libcuda.so" in found.said and not facts.gpus.source
    if not found.library:
        text = f"{version}: {found.trouble}"
    elif lacks_driver:
        text = f"{version}, its library needs the driver (libcuda.so.1), and there is none here"
    elif found.status:
        text = f"/bin/true with LD_PRELOAD={found.library} ended with status {found.status}: {found.said}"
    else:
        text = f"{found.library} is not loaded: {found.said}" if found.said else f"{version}, {found.library} loads"
    yield from first(
        "torch-memory-saver",
        text,
        (not found.library, "warning", "", "install a torch for CUDA there, or leave it out"),
        (lacks_driver, "warning", "", "fine on a machine without GPUs; else install the driver"),
        (found.status or found.said, "error", "", remedy),
    )


def communicators(facts: MachineFacts) -> Iterator[Finding]:
    """Whether a gang's communicators can leave a device."""
    if len(facts.gpus.found) > 1 and "torch" in facts.versions:
        built, none = "reloaded by a proxy that {} compiles once", "there is no C++ compiler to build the proxy of them"
        remedy = 'install g++: with memory.share = "switch" they would stay on the device (0.65 GiB each)'
        text = built.format(facts.compiler) if facts.compiler else none
        yield from first("communicators", text, (not facts.compiler, "warning", "", remedy))


def environment(facts: MachineFacts) -> Iterator[Finding]:
    """Variables that every actor inherits."""
    env = facts.env
    allocators = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    rows: list[tuple[str, object, str, str]] = [
        ("NCCL_CUMEM_ENABLE", env.get("NCCL_CUMEM_ENABLE", "") not in ("", "0"),
         f"= {env.get('NCCL_CUMEM_ENABLE')} here; SGLang's servers set it to 0, and members of a group must agree",
         "unset it, or set it alike for trainer and engines (roles.*.env)"),
        *((name, "expandable_segments:true" in env.get(name, "").lower(),
           "expandable_segments is on: torch-memory-saver refuses it, arenas do without",
           'unset it for runs with memory.share = "switch"') for name in allocators),
        ("LD_PRELOAD", env.get("LD_PRELOAD"), f"= {env.get('LD_PRELOAD')}: every actor loads it",
         "unset it unless you mean it"),
        ("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES" in env,
         f"= {env.get('CUDA_VISIBLE_DEVICES')!r}: actors get the GPUs of roles.*.devices, whatever it says",
         "unset it, and name the GPUs in the run file"),
    ]  # fmt: skip
    for name, holds, meaning, remedy in rows:
        yield from if_so(name, (holds, "warning", meaning, remedy))


LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost", "::1"})


def hostname(facts: MachineFacts) -> Iterator[Finding]:
    """Other nodes use this name."""
    addresses = ", ".join(facts.addresses)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in facts.addresses)
    return first(
        "hostname",
        facts.hostname if facts.hostname_trouble else f"{facts.hostname} resolves to {addresses}",
        (facts.hostname_trouble, "warning", f" does not resolve: {facts.hostname_trouble}",
         "add it to /etc/hosts with the address that other nodes reach; one machine alone does without"),
        (facts.addresses and is_loopback, "warning", ": other nodes would call themselves",
         "give it its real address in /etc/hosts, or name an address: --rdzv ADDRESS:PORT"),
    )  # fmt: skip


def ports(facts: MachineFacts) -> Iterator[Finding]:
    trouble = f"0.0.0.0: {facts.address_trouble}" if facts.address_trouble else ""
    trouble = f"127.0.0.1: {facts.loopback_trouble}" if facts.loopback_trouble else trouble
    yield from first(
        "ports",
        trouble or "127.0.0.1 and 0.0.0.0 can be listened on",
        (facts.loopback_trouble, "error", "", "bring the loopback interface up (ip link set lo up)"),
        (trouble, "warning", "", "one machine alone does without; several need it"),
    )
    meaning = f"{facts.port_trouble}: `myxa launch` meets there by default"
    remedy = "end what listens there (ss -ltnp), or give another one: --rdzv HOST:PORT"
    yield from if_so("port 29400", (facts.port_trouble, "warning", meaning, remedy))
    none = f"not here ({facts.ipv6_trouble}); addresses like [::1]:29400 will not work, nothing needs them"
    yield from first("ipv6", none if facts.ipv6_trouble else "works")


def leftovers(facts: MachineFacts) -> Iterator[Finding]:
    """Live runs of this user on this host, and what ended runs left."""
    alive = [run.run_dir for run in facts.runs if run.is_alive]
    if alive:
        yield from first("runs", f"{len(alive)} live: {', '.join(alive)}")
    for run in facts.runs:
        pids = " ".join(map(str, run.pids))
        orphans = f"actors of {run.run_dir or run.folder} are there without their launcher: {pids}"
        folder = f"{run.folder} was left by the run {run.run_dir or 'of a launcher that was killed'}"
        yield from if_so(
            "leftovers",
            (
                not run.is_alive and pids,
                "warning",
                orphans,
                f"they end by themselves within seconds; else: kill {pids}",
            ),
            (not run.is_alive, "warning", folder, f"rm -r {run.folder}"),
        )
    if not facts.runs:
        yield from first("leftovers", "none of earlier runs")


def servers(facts: MachineFacts) -> Iterator[Finding]:
    """An SGLang server without a key takes weights from every client that reaches it."""
    for server in facts.servers:
        is_far = server.host not in LOCAL_HOSTS
        yield from if_so(
            f"sglang {server.pid}",
            (is_far and not server.has_key, "error",
             f"listens on {server.host} without a key: every client that reaches it can load weights and stop it",
             "start it with --admin-api-key and --host 127.0.0.1, and name the key in engine.key_env"),
            (not server.has_key, "warning", "has no key: every user of this host can load weights",
             "start it with --admin-api-key, and name the key in engine.key_env"),
            (is_far, "warning", f"listens on {server.host}: its key travels in the clear",
             "start it with --host 127.0.0.1, or keep it in a private network"),
        )  # fmt: skip


MACHINE_CHECKS = (
    python, operating_system, memory, shared_memory, open_files, disk, rights, clock, packages, sglang, megatron, gpu,
    preload, communicators, environment, hostname, ports, leftovers, servers,
)  # fmt: skip
