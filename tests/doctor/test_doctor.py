"""Every trap that `myxa doctor` knows, by a machine that was made up; and the real one, which it must not mistake."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from myxa.core.config.loading import Finding
from myxa.core.errors import LaunchError
from myxa.core.tried_versions import TRIED, untried
from myxa.launch.checks import machine
from myxa.launch.checks.all_checks import findings_json, findings_text, judge
from myxa.launch.checks.machine import MachineFacts
from myxa.launch.cli import main
from myxa.launch.host import Gpu, Gpus, check_port, look_at_gpus

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB)
VERSIONS = {
    "torch": "2.11.0+cu130", "sglang": "0.5.17", "megatron-core": "0.19.2", "torch-memory-saver": "0.0.10",
    "nvidia-ml-py": "13.580", "nvidia-nccl-cu13": "2.28.9",
}  # fmt: skip

GOOD = MachineFacts(
    system="Python 3.12.3 at /usr/bin/python3, Linux", versions=VERSIONS, torch_cuda="13.0",
    gpus=Gpus((H200,) * 8, "580.159.04"),
    total_bytes=512 * GIB, available_bytes=480 * GIB, ninja="/usr/bin/ninja", shm_bytes=64 * GIB, max_files=1 << 20,
    hostname="gpu07", addresses=("10.0.0.7",), folder="/data/runs", free_bytes=900 * GIB, is_writable=True,
    file_system="ext4", env={}, sandboxes={"rlimits": "", "bubblewrap": "", "docker": "there is no docker"},
)  # fmt: skip


def but(**changed: Any) -> MachineFacts:
    """The good machine with other facts."""
    return replace(GOOD, **changed)


def versions(**other: str) -> dict[str, str]:
    found = {**VERSIONS, **{name.replace("_", "-"): value for name, value in other.items()}}
    return {name: value for name, value in found.items() if value}


def bad(facts: MachineFacts) -> list[Finding]:
    return [check for check in judge(facts) if check.severity != "ok"]


def test_nothing_is_found_on_a_good_machine() -> None:
    assert bad(GOOD) == []


TRAPS: dict[str, tuple[MachineFacts, str, str, str]] = {
    # name: (facts, check, status, a word of the remedy)
    "little memory": (but(available_bytes=GIB), "memory", "warning", "limit"),
    "small shm": (but(shm_bytes=64 << 20), "/dev/shm", "warning", "--shm-size"),
    "no shm": (but(shm_bytes=None), "/dev/shm", "warning", "tmpfs"),
    "no namespaces": (but(sandboxes={"rlimits": "Operation not permitted"}), "sandboxes", "warning", "namespaces"),
    "no ninja": (but(ninja=""), "ninja", "warning", "pip install ninja"),
    "few files": (but(max_files=512), "open files", "error", "ulimit"),
    "rather few files": (but(max_files=2048), "open files", "warning", "65536"),
    "disk of others": (but(is_writable=False), "disk", "error", "run.dir"),
    "full disk": (but(free_bytes=GIB), "disk", "warning", "run.dir"),
    "network disk": (but(file_system="nfs4"), "disk", "warning", "local disk"),
    "no torch": (but(versions=versions(torch="", sglang="", megatron_core="", torch_memory_saver="")), "packages", "warning", "myxa[gpu]"),
    "new SGLang": (but(versions=versions(sglang="0.6.0rc1")), "sglang", "warning", "short run"),
    "old Megatron": (but(versions=versions(megatron_core="0.15.3")), "megatron-core", "warning", "short run"),
    "old driver": (but(gpus=replace(GOOD.gpus, driver="570.86.15")), "gpu", "error", "update the driver"),
    "no driver": (but(gpus=Gpus((), trouble="nvidia-ml-py is not installed")), "gpu", "warning", "nvidia-smi"),
    "torch without CUDA": (but(torch_cuda=""), "gpu", "warning", "CUDA"),
    "cumem on": (but(env={"NCCL_CUMEM_ENABLE": "1"}), "NCCL_CUMEM_ENABLE", "warning", "alike"),
    "expandable segments": (but(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), "PYTORCH_CUDA_ALLOC_CONF", "warning", "switch"),
    "visible devices": (but(env={"CUDA_VISIBLE_DEVICES": "3"}), "CUDA_VISIBLE_DEVICES", "warning", "run file"),
    "hostname is loopback": (but(addresses=("127.0.1.1",)), "hostname", "warning", "--rdzv"),
    "hostname unknown": (but(addresses=()), "hostname", "warning", "/etc/hosts"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_seen_and_nothing_else(name: str) -> None:
    facts, check, status, word = TRAPS[name]
    found = bad(facts)
    assert [(one.key, one.severity) for one in found] == [(check, status)], found
    assert word in found[0].error.remedy, found[0]


@pytest.mark.parametrize(
    ("package", "version", "word"),
    [
        ("sglang", "0.5.16", "older"), ("sglang", "0.5.24", "newer"), ("sglang", "1", "newer"), ("torch", "2.14.1", "newer"),
        ("sglang", "0.5.23.post1", ""), ("torch", "2.13.9+cpu", ""), ("torch", "2.12.0", ""), ("sglang", "", ""),
        ("transformers", "main\x1b[2J", "another"), ("sglang", "9" * 10_000, "newer"),
    ],
)  # fmt: skip
def test_a_version_is_known_up_to_the_numbers_that_were_tried(package: str, version: str, word: str) -> None:
    text = untried(package, version)
    assert bool(text) is bool(word)
    assert word in text
    assert text.isprintable()
    assert len(text) < 200
    assert not text or all(one in text for one in TRIED[package])


def test_what_is_pinned_was_tried() -> None:
    pins = [ROOT / "constraints.txt", *(ROOT / "tests/engines/sglang_cpu").glob("*.txt")]
    lines = [line.partition(";")[0].strip().split("==") for path in pins for line in path.read_text().splitlines()]
    found = {(one[0], one[1]) for one in lines if one[0] in TRIED}
    assert {version for package, version in found if package == "sglang"} == set(TRIED["sglang"])
    assert {package for package, _ in found} == set(TRIED)
    assert [untried(*one) for one in found if untried(*one)] == []


def test_the_page_and_the_answer_for_programs() -> None:
    checks = judge(but(gpus=replace(GOOD.gpus, driver="570.86.15"), shm_bytes=1 << 20))
    page = findings_text(checks).splitlines()
    (line,) = [number for number, text in enumerate(page) if text.startswith("FAIL")]
    assert "570.86.15" in page[line]
    assert page[line + 1].strip().startswith("-> update the driver")
    assert page[-1].endswith("1 to look at, 1 to mend")
    answer = findings_json(checks)
    assert answer["ok"] is False
    assert json.loads(json.dumps(answer)) == answer
    assert findings_json(judge(GOOD))["ok"] is True


# -- the real machine --------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = machine.gather(str(tmp_path / "runs" / "deeper"))
    assert facts.folder == str(tmp_path)
    assert facts.free_bytes
    assert facts.file_system
    assert facts.available_bytes <= facts.total_bytes
    assert facts.versions["torch"]
    code = main(["doctor", "--json", "--dir", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["ok"] else 1)
    assert {"system", "memory", "disk", "gpu", "hostname"} <= {c["name"] for c in answer["checks"]}
    assert all(check["remedy"] for check in answer["checks"] if check["status"] != "ok")


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"x: cannot listen on 127.0.0.1:{port}: .*in use -- y"):
            check_port("x", "127.0.0.1", port, "y")
    check_port("x", "127.0.0.1", 0, "y")


def test_of_a_gpu_that_is_split_the_first_slice_that_is_seen_counts(monkeypatch: pytest.MonkeyPatch):
    class NVMLError(Exception):
        pass

    def slice_of(handle: str, index: int) -> str:
        if handle != "GPU-b" or index != 2:
            raise NVMLError("Not Found")
        return "MIG-b2"

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetDriverVersion=lambda: "580", nvmlDeviceGetHandleByIndex=["GPU-a", "GPU-b"].__getitem__,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of, nvmlDeviceGetName=str, nvmlDeviceGetUUID=str,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=len(handle), used=0),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [gpu.uuid for gpu in look_at_gpus().found] == ["GPU-a", "MIG-b2"]
