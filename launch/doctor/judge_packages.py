"""Versions that go together, torch and the driver, torch-memory-saver in front of a process. Pure.

The table of versions is that of the exact pins in the packages' own metadata: an SGLang is built for one torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .check import Judge, MachineCheck, error, ok, warning
from .machine_facts import MachineFacts

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
NCCL_SUSPEND = (2, 29, 7)
DRIVER_OF_CUDA: Mapping[int, int] = MappingProxyType({13: 580, 12: 525})
"""CUDA's major version -> oldest driver."""
NEEDED = ("pyzmq", "pydantic", "numpy")
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
    """A list, for whoever reads a report of somebody else's machine."""
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
            "give SGLang an environment of its own and name its interpreter in engine.python",
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
    elif found.said:  # the loader warns and goes on without it: nothing could be paused
        yield error(name, f"{found.library} is not loaded: {found.said}", remedy)
    else:
        yield ok(name, f"{version}, {found.library} loads")


def communicators(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Whether a gang's communicators can leave a device."""
    if len(facts.gpus.found) < 2 or "torch" not in facts.packages.versions:
        return
    nccl = next((value for name, value in facts.packages.versions.items() if name.startswith("nvidia-nccl-")), "")
    if nccl and parts(nccl) >= NCCL_SUSPEND:
        yield ok("communicators", f"NCCL {nccl} can suspend them")
    elif facts.packages.compiler:
        yield ok("communicators", f"reloaded by a proxy that {facts.packages.compiler} compiles once")
    else:
        yield warning(
            "communicators",
            f"NCCL {nccl or 'of an unknown version'} cannot suspend them and there is no C++ compiler",
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


JUDGES: tuple[Judge, ...] = (installed, sglang, megatron, driver, preload, communicators, environment)
