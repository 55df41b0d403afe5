"""Every trap that `myxa doctor` knows, by a machine that was made up; and the real one, which it must not mistake."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from myxa.launch.actor_spec import ActorSpec
from myxa.launch.checks import machine
from myxa.launch.checks.all_checks import findings_json, findings_text, judge
from myxa.launch.checks.check import Finding
from myxa.launch.checks.machine import FoundRun, MachineFacts, Preload, Server, find_runs, numbers, server_of
from myxa.launch.cli import main
from myxa.launch.control.client import ControlNote
from myxa.launch.host import Gpu, Gpus, listen_trouble
from myxa.launch.worker_spec import SPEC_VARIABLE, ProcessSpec, write_spec

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB)
VERSIONS = {
    "torch": "2.11.0+cu130", "sglang": "0.5.17", "megatron-core": "0.19.2", "torch-memory-saver": "0.0.10",
    "nvidia-ml-py": "13.580", "nvidia-nccl-cu13": "2.28.9",
}  # fmt: skip

GOOD = MachineFacts(
    python=(3, 12, 3), executable="/usr/bin/python3", architecture="x86_64", os_name="Ubuntu 24.04", kernel=(6, 8),
    libc="glibc 2.39", versions=VERSIONS, torch_cuda="13.0", compiler="/usr/bin/g++",
    gpus=Gpus((H200,) * 8, "580.159.04", "NVML"),
    preload=Preload("/site/torch_memory_saver_hook_mode_preload_cu13.abi3.so", status=0),
    total_bytes=512 * GIB, available_bytes=480 * GIB, cgroup_bytes=None, shm_bytes=64 * GIB,
    num_files=(65536, 1 << 20), overcommit=0, hostname="gpu07", addresses=("10.0.0.7",), hostname_trouble="",
    loopback_trouble="", address_trouble="", port_trouble="", folder="/data/runs",
    free_bytes=900 * GIB, is_writable=True, file_system="ext4", ptrace_scope=1, memfd_trouble="", pidfd_trouble="",
    socket_trouble="", wall_s=1_800_000_000.0, newest_file_s=1_790_000_000.0, clock_source="tsc", runs=(), servers=(), env={},
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
    "no overcommit": (but(overcommit=2), "overcommit", "warning", "sysctl"),
    "small shm": (but(shm_bytes=64 << 20), "/dev/shm", "warning", "--shm-size"),
    "no shm": (but(shm_bytes=None), "/dev/shm", "warning", "tmpfs"),
    "few files": (but(num_files=(256, 512)), "open files", "error", "ulimit"),
    "rather few files": (but(num_files=(1024, 2048)), "open files", "warning", "65536"),
    "disk of others": (but(is_writable=False), "disk", "error", "run.dir"),
    "full disk": (but(free_bytes=GIB), "disk", "warning", "myxa plan"),
    "network disk": (but(file_system="nfs4"), "disk", "warning", "local disk"),
    "strict yama": (but(ptrace_scope=2), "ptrace", "warning", "ptrace_scope=1"),
    "no memfd": (but(memfd_trouble="Function not implemented"), "memfd_create", "error", "kernel"),
    "no pidfd": (but(pidfd_trouble="Operation not permitted"), "pidfd_open", "error", "seccomp"),
    "long TMPDIR": (but(socket_trouble="too long names"), "sockets", "error", "TMPDIR"),
    "clock behind": (but(wall_s=0.0), "clock", "warning", "set-ntp"),
    "slow clock": (but(clock_source="hpet"), "clock", "warning", "tsc"),
    "no torch": (but(versions=versions(torch="", sglang="", megatron_core="", torch_memory_saver="")), "packages", "warning", "myxa[gpu]"),
    "sglang for another torch": (but(versions=versions(sglang="0.5.23")), "sglang", "error", "engine.python"),
    "old sglang": (but(versions=versions(sglang="0.5.9")), "sglang", "error", "0.5.17"),
    "megatron on python 3.11": (but(python=(3, 11, 7)), "megatron-core", "error", "0.16.1"),
    "old megatron": (but(versions=versions(megatron_core="0.15.0")), "megatron-core", "error", "0.16"),
    "old driver": (but(gpus=replace(GOOD.gpus, driver="570.86.15")), "gpu", "error", "update the driver"),
    "no driver": (but(gpus=Gpus((), trouble="nvidia-ml-py is not installed")), "gpu", "warning", "nvidia-smi"),
    "torch without CUDA": (but(torch_cuda=""), "gpu", "warning", "CUDA"),
    "no nvml": (but(versions=versions(nvidia_ml_py="")), "nvml", "warning", "nvidia-ml-py"),
    "preload kills": (but(preload=replace(GOOD.preload, status=127, said="libcudart.so.13: cannot open")), "torch-memory-saver", "error", "LD_LIBRARY_PATH"),
    "preload is ignored": (but(preload=replace(GOOD.preload, said="object cannot be preloaded: ignored")), "torch-memory-saver", "error", "LD_LIBRARY_PATH"),
    "preload unknown": (but(preload=Preload("", "could not detect CUDA runtime")), "torch-memory-saver", "warning", "torch for CUDA"),
    "no compiler": (but(compiler=""), "communicators", "warning", "g++"),
    "cumem on": (but(env={"NCCL_CUMEM_ENABLE": "1"}), "NCCL_CUMEM_ENABLE", "warning", "alike"),
    "expandable segments": (but(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}), "PYTORCH_CUDA_ALLOC_CONF", "warning", "switch"),
    "a preload of one's own": (but(env={"LD_PRELOAD": "/x.so"}), "LD_PRELOAD", "warning", "unset"),
    "visible devices": (but(env={"CUDA_VISIBLE_DEVICES": "3"}), "CUDA_VISIBLE_DEVICES", "warning", "run file"),
    "hostname is loopback": (but(addresses=("127.0.1.1",)), "hostname", "warning", "--rdzv"),
    "hostname unknown": (but(addresses=(), hostname_trouble="Name or service not known"), "hostname", "warning", "/etc/hosts"),
    "no loopback": (but(loopback_trouble="Cannot assign"), "ports", "error", "lo up"),
    "no other addresses": (but(address_trouble="Permission denied"), "ports", "warning", "several"),
    "meeting port taken": (but(port_trouble="Address already in use"), "port 29400", "warning", "--rdzv"),
    "leftover processes": (but(runs=(FoundRun("runs/a", "/tmp/myxa-1", 5, False, (7, 8)),)), "leftovers", "warning", "kill 7 8"),
    "leftover folder": (but(runs=(FoundRun("runs/a", "/tmp/myxa-1", 5, False),)), "leftovers", "warning", "rm -r /tmp/myxa-1"),
    "open server": (but(servers=(Server(9, "0.0.0.0", False),)), "sglang 9", "error", "--admin-api-key"),
    "server without a key": (but(servers=(Server(9, "127.0.0.1", False),)), "sglang 9", "warning", "key_env"),
    "server on every address": (but(servers=(Server(9, "0.0.0.0", True),)), "sglang 9", "warning", "127.0.0.1"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_each_trap_is_seen_and_nothing_else(name: str) -> None:
    facts, check, status, word = TRAPS[name]
    found = bad(facts)
    assert [(one.key, one.severity) for one in found] == [(check, status)], found
    assert word in found[0].error.remedy, found[0]


def test_a_preload_that_lacks_the_driver_is_fine_where_there_is_none() -> None:
    """What the library of torch-memory-saver 0.0.10 does on a machine without GPUs."""
    said = "/bin/true: error while loading shared libraries: libcuda.so.1: cannot open shared object file"
    without = Gpus((), trouble="nvidia-ml-py is not installed")
    no_driver = but(preload=replace(GOOD.preload, status=127, said=said), gpus=without, torch_cuda="")
    (found,) = bad(no_driver)
    assert (found.key, found.severity) == ("torch-memory-saver", "warning")
    (found,) = bad(but(preload=replace(GOOD.preload, status=127, said=said)))
    assert found.severity == "error", "there are GPUs, so it must load"


def test_a_control_group_counts_and_not_the_machine() -> None:
    checks = {check.key: check for check in judge(but(cgroup_bytes=8 * GIB, available_bytes=7 * GIB))}
    assert checks["memory"].severity == "ok"
    assert "the control group allows 8.0 GiB: that counts, not MemTotal" in checks["memory"].error.message


def test_a_run_that_goes_on_is_no_leftover() -> None:
    checks = judge(but(runs=(FoundRun("runs/a", "/tmp/myxa-1", 5, True, (7,)),)))
    (found,) = [check for check in checks if check.key in ("runs", "leftovers")]
    assert (found.key, found.severity) == ("runs", "ok")
    assert "runs/a" in found.error.message


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
    assert facts.versions["pyzmq"]
    assert facts.memfd_trouble == facts.pidfd_trouble == facts.loopback_trouble == ""
    code = main(["doctor", "--json", "--dir", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["ok"] else 1)
    assert {"python", "system", "memory", "disk", "gpu", "hostname", "ports"} <= {c["name"] for c in answer["checks"]}
    assert all(check["remedy"] for check in answer["checks"] if check["status"] != "ok")


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in listen_trouble("127.0.0.1", port)
    assert listen_trouble("127.0.0.1", 0) == ""


def test_a_library_in_front_of_a_process(tmp_path: Path) -> None:
    """Real preloads by the real loader: one that loads, one that is not there, one whose own library is missing."""
    compiler = next((path for name in ("cc", "gcc", "c++") if (path := machine.shutil.which(name))), "")
    if not compiler:
        pytest.skip("no C compiler here")
    env = dict(os.environ)
    (tmp_path / "inner.c").write_text("int inner(void) { return 1; }\n")
    (tmp_path / "outer.c").write_text("int inner(void); int outer(void) { return inner(); }\n")
    build = [compiler, "-shared", "-fPIC", "-o"]
    subprocess.run([*build, tmp_path / "libinner.so", tmp_path / "inner.c"], check=True)
    subprocess.run([*build, tmp_path / "outer.so", tmp_path / "outer.c", "-L", tmp_path, "-linner"], check=True)
    outer = str(tmp_path / "outer.so")
    found = machine.try_preload(outer, env)
    assert found.status == 127, "a preload whose library is missing ends the process before it starts"
    assert "libinner.so" in found.said
    assert [check.severity for check in bad(but(preload=found))] == ["error"]
    found = machine.try_preload(outer, {**env, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (found.status, found.said) == (0, "")
    found = machine.try_preload(str(tmp_path / "nowhere.so"), env)
    assert found.status == 0
    assert "cannot be preloaded" in found.said
    assert [check.severity for check in bad(but(preload=found))] == ["error"], "it would be ignored, and nothing paused"


@pytest.mark.parametrize(
    ("line", "host", "has_key"),
    [
        ("python -m sglang.launch_server --host 0.0.0.0 --port 3", "0.0.0.0", False),
        ("python -m sglang.launch_server --host=10.0.0.7 --admin-api-key=x", "10.0.0.7", True),
        ("python -m sglang.launch_server --config keys.yaml", "127.0.0.1", True),
        ("python -m sglang.launch_server", "127.0.0.1", False),
    ],
)
def test_servers_by_their_command_line(line: str, host: str, has_key: bool) -> None:
    assert server_of(1, line.split()) == Server(1, host, has_key)


# -- leftovers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runtime folders are, for this test."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(machine, "short_base", lambda: str(folder))
    return folder


def dead_pid() -> int:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    return process.pid


def note(folder: Path, run_dir: str, pid: int) -> None:
    folder.mkdir()
    ControlNote(run_dir=run_dir, control=str(folder / "c"), view=str(folder / "v"), pid=pid).save(folder)


def of(folder: Path) -> FoundRun:
    (found,) = [run for run in find_runs() if run.folder == str(folder)]
    return found


def test_runs_are_known_by_their_notes(base: Path) -> None:
    note(base / "myxa-alive", "/runs/a", os.getpid())
    note(base / "myxa-gone", "/runs/b", dead_pid())
    (base / "myxa-not-ours-at-all").mkdir()
    (base / "other").mkdir()
    found = {Path(run.folder).name for run in find_runs() if run.folder.startswith(str(base))}
    assert found == {"myxa-alive", "myxa-gone"}
    assert of(base / "myxa-alive").is_alive
    assert not of(base / "myxa-gone").is_alive
    assert of(base / "myxa-gone").run_dir == "/runs/b"


def test_a_launcher_that_has_no_note_is_known_by_its_guard(base: Path) -> None:
    folder = base / "myxa-follower"
    folder.mkdir()
    (folder / "rdzv.json").write_text("{}")
    assert not of(folder).is_alive
    command = ["/bin/sh", "-c", 'cat >/dev/null; : "$1"', "sh", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert of(folder).is_alive
        assert guard.stdin is not None
        guard.stdin.close()
    assert not of(folder).is_alive


def test_actors_without_their_launcher_are_named(base: Path) -> None:
    """A process with an actor's command line and description, whose launcher is gone."""
    folder = base / "myxa-orphans"
    folder.mkdir()
    spec = ProcessSpec(
        actor=ActorSpec(name="rollout/0", role="rollout", kind="embedded", index=0, node=0), attempt=0,
        launcher_pid=dead_pid(), config_path="", run_dir="/runs/c", socket_dir=str(folder), rdzv_path="",
    )  # fmt: skip
    path = write_spec(spec, folder)
    code = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", code, "-m", "myxa.launch.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, SPEC_VARIABLE: str(path)}) as orphan:
        try:
            found = of(folder)
        finally:
            assert orphan.stdin is not None
            orphan.stdin.close()
    assert (found.run_dir, found.is_alive, found.pids) == ("/runs/c", False, (orphan.pid,))
    (check,) = bad(but(runs=(found,)))
    assert f"kill {orphan.pid}" in check.error.remedy
