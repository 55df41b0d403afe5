"""Every trap that `myxa doctor` knows, by a machine that was made up; and the real one, which it must not mistake."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from myxa.launch.checks import machine
from myxa.launch.checks.all_checks import findings_json, findings_text, judge
from myxa.launch.checks.check import Finding
from myxa.launch.checks.machine import MachineFacts, numbers
from myxa.launch.cli import main
from myxa.launch.host import Gpu, Gpus, listen_trouble

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB)
VERSIONS = {
    "torch": "2.11.0+cu130", "sglang": "0.5.17", "megatron-core": "0.19.2", "torch-memory-saver": "0.0.10",
    "nvidia-ml-py": "13.580", "nvidia-nccl-cu13": "2.28.9",
}  # fmt: skip

GOOD = MachineFacts(
    python=(3, 12, 3), executable="/usr/bin/python3", architecture="x86_64", os_name="Ubuntu 24.04", kernel=(6, 8),
    libc="glibc 2.39", versions=VERSIONS, torch_cuda="13.0",
    gpus=Gpus((H200,) * 8, "580.159.04", "NVML"),
    total_bytes=512 * GIB, available_bytes=480 * GIB, cgroup_bytes=None, shm_bytes=64 * GIB,
    num_files=(65536, 1 << 20), hostname="gpu07", addresses=("10.0.0.7",),
    port_trouble="", folder="/data/runs",
    free_bytes=900 * GIB, is_writable=True, file_system="ext4",
    socket_trouble="", env={},
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
    "old python": (but(python=(3, 10, 4), versions=versions(megatron_core="0.16.1")), "python", "error", "3.11"),
    "old kernel": (but(kernel=(4, 18)), "system", "error", "5.3"),
    "old glibc": (but(libc="glibc 2.31"), "system", "warning", "2.34"),
    "musl": (but(libc="a C library that is not glibc"), "system", "warning", "glibc"),
    "little memory": (but(available_bytes=GIB), "memory", "warning", "limit"),
    "small shm": (but(shm_bytes=64 << 20), "/dev/shm", "warning", "--shm-size"),
    "no shm": (but(shm_bytes=None), "/dev/shm", "warning", "tmpfs"),
    "few files": (but(num_files=(256, 512)), "open files", "error", "ulimit"),
    "rather few files": (but(num_files=(1024, 2048)), "open files", "warning", "65536"),
    "disk of others": (but(is_writable=False), "disk", "error", "run.dir"),
    "full disk": (but(free_bytes=GIB), "disk", "warning", "myxa plan"),
    "network disk": (but(file_system="nfs4"), "disk", "warning", "local disk"),
    "long TMPDIR": (but(socket_trouble="too long names"), "sockets", "error", "TMPDIR"),
    "no torch": (but(versions=versions(torch="", sglang="", megatron_core="", torch_memory_saver="")), "packages", "warning", "myxa[gpu]"),
    "old sglang": (but(versions=versions(sglang="0.5.9")), "sglang", "error", "0.5.17"),
    "megatron on python 3.11": (but(python=(3, 11, 7)), "megatron-core", "error", "0.16.1"),
    "old megatron": (but(versions=versions(megatron_core="0.15.0")), "megatron-core", "error", "0.16"),
    "old driver": (but(gpus=replace(GOOD.gpus, driver="570.86.15")), "gpu", "error", "update the driver"),
    "no driver": (but(gpus=Gpus((), trouble="nvidia-ml-py is not installed")), "gpu", "warning", "nvidia-smi"),
    "torch without CUDA": (but(torch_cuda=""), "gpu", "warning", "CUDA"),
    "no nvml": (but(versions=versions(nvidia_ml_py="")), "nvml", "warning", "nvidia-ml-py"),
    "cumem on": (but(env={"NCCL_CUMEM_ENABLE": "1"}), "NCCL_CUMEM_ENABLE", "warning", "alike"),
    "expandable segments": (but(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), "PYTORCH_CUDA_ALLOC_CONF", "warning", "switch"),
    "visible devices": (but(env={"CUDA_VISIBLE_DEVICES": "3"}), "CUDA_VISIBLE_DEVICES", "warning", "run file"),
    "hostname is loopback": (but(addresses=("127.0.1.1",)), "hostname", "warning", "--rdzv"),
    "hostname unknown": (but(addresses=()), "hostname", "warning", "/etc/hosts"),
    "meeting port taken": (but(port_trouble="Address already in use"), "port 29400", "warning", "--rdzv"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_seen_and_nothing_else(name: str) -> None:
    facts, check, status, word = TRAPS[name]
    found = bad(facts)
    assert [(one.key, one.severity) for one in found] == [(check, status)], found
    assert word in found[0].error.remedy, found[0]


def test_a_control_group_counts_and_not_the_machine() -> None:
    checks = {check.key: check for check in judge(but(cgroup_bytes=8 * GIB, available_bytes=7 * GIB))}
    assert checks["memory"].severity == "ok"
    assert "the control group allows 8.0 GiB: that counts, not MemTotal" in checks["memory"].error.message


@pytest.mark.parametrize(
    ("text", "expected"), [("2.11.0+cu130", (2, 11, 0)), ("0.5.17.post1", (0, 5, 17)), ("13", (13,)), ("", ())]
)
def test_versions(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


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
    assert facts.python == sys.version_info[:3]
    assert facts.folder == str(tmp_path)
    assert facts.free_bytes
    assert facts.file_system
    assert facts.available_bytes <= facts.total_bytes
    assert facts.versions["torch"]
    assert facts.socket_trouble == ""
    code = main(["doctor", "--json", "--dir", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["ok"] else 1)
    assert {"python", "system", "memory", "disk", "gpu", "hostname"} <= {c["name"] for c in answer["checks"]}
    assert all(check["remedy"] for check in answer["checks"] if check["status"] != "ok")


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in listen_trouble("127.0.0.1", port)
    assert listen_trouble("127.0.0.1", 0) == ""
