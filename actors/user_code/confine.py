"""The first process of a sandbox: it gives up rights, and starts the command as a process that cannot get them back.

    python -I -S confine.py <what is confined, JSON> <command and its arguments>

    actor ── confine ── confine, process 1 of namespaces of its own ── command and all that it starts

With namespaces the command sees no process but its own, no network but a loopback of its own, and a root folder made of
what is named in `visible`, read-only, and of its scratch folder, which is also /dev/shm. All ends with process 1, which
ends with the command, with SIGTERM to the first process, and with the actor. Without namespaces only limits and the
user are set. It stands for itself: it runs under interpreters that lack this package, and starts within milliseconds.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_RDONLY = 4096, 8192, 16384, 1 << 18, 2, 4, 1
SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY, AT_RECURSIVE = 442, 1, 0x8000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DEVICES = ("null", "zero", "full", "random", "urandom")
LOADED = (warnings,)
"""execvp imports it, when its file may be out of sight."""
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> None:
    """A function of libc, texts as bytes. Raises OSError."""
    if getattr(libc, name)(*(os.fsencode(one) if isinstance(one, str) else one for one in args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def new_namespaces(*, has_network: bool) -> None:
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWNS | NEWIPC | NEWPID | (0 if has_network else NEWNET) | (NEWUSER if user else 0))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        if user:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def make_readonly(path: str, flags: int) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("4Q", MOUNT_ATTR_RDONLY, 0, 0, 0))
    call("syscall", SYS_MOUNT_SETATTR, -100, path, flags, attributes, 32)


def new_root(scratch: str, visible: list[str], scratch_mb: int) -> None:
    """The root folder becomes one in memory with nothing but what is visible."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = f"{scratch}/.root"
    os.umask(0o022)
    os.makedirs(root, exist_ok=True)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in sorted({path.rstrip("/") for path in visible}):
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        elif not os.path.exists(root + path):
            bind(path, root + path, MS_REC)
            make_readonly(root + path, AT_RECURSIVE)
    for name in DEVICES:
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    os.makedirs(f"{root}/tmp", exist_ok=True)
    if scratch_mb:
        os.makedirs(root + scratch, exist_ok=True)
        mount("tmpfs", root + scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_mb}m,nr_inodes=4096,mode=777")
    else:
        bind(scratch, root + scratch)
    bind(root + scratch, f"{root}/dev/shm")
    os.makedirs(f"{root}/proc", exist_ok=True)
    try:
        # settings of the kernel are root's to write, without any capability: a program to start at a crash, for one
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    except OSError:
        pass  # a container may hide parts of it, and then it cannot be had
    make_readonly(root, 0)
    os.chdir(root)
    mount(root, "/", None, MS_MOVE)
    os.chroot(".")


def bind(path: str, target: str, more_flags: int = 0) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(path, target, None, MS_BIND | more_flags)


def listen_for_gateway(channel: int, port: int) -> None:
    """Send the actor a socket that listens on this loopback: the only way out of it."""
    import socket  # which takes as long as all else

    with socket.socket() as loopback:  # bubblewrap has done it
        libc.ioctl(loopback.fileno(), SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    with socket.socket(fileno=channel) as actor, socket.create_server(("127.0.0.1", port), backlog=256) as server:
        socket.send_fds(actor, [b"+"], [server.fileno()])


def give_up_rights(user: int, limits: dict[str, int]) -> None:
    if limits["NPROC"]:
        limits["NPROC"] += num_tasks(user)
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if value:
            resource.setrlimit(number, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def num_tasks(user: int) -> int:
    """Of the user: the kernel counts them all, or those of these namespaces, by its version."""
    found = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # it ended
    return found


def wait_for(child: int) -> None:
    """End as the child does; orphans that it leaves are reaped meanwhile."""
    pid, status = 0, 0
    while pid != child:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    told, command = json.loads(sys.argv[1]), sys.argv[2:]
    if not told["namespaces"]:
        return become(told, command)
    die_with_parent()
    if os.getppid() != told["parent"]:
        sys.exit(128 + signal.SIGKILL)
    alive, ours = os.pipe()
    new_namespaces(has_network=told["network"])
    first = os.fork()
    if first:
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(first, signal.SIGKILL))
        os.closerange(3, ours)
        os.closerange(ours + 1, 1 << 16)
        return wait_for(first)
    die_with_parent()
    os.close(ours)
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
        os._exit(1)  # the parent ended before the kernel could be asked
    except BlockingIOError:
        os.close(alive)
    new_root(told["scratch"], told["visible"], told["scratch_mb"])
    command_pid = os.fork()
    if command_pid:
        return wait_for(command_pid)
    return become(told, command)


def become(told: "dict[str, Any]", command: list[str]) -> None:
    """Does not return."""
    if told["gateway"]:
        listen_for_gateway(*told["gateway"])
    give_up_rights(told["user"], told["limits"])
    os.chdir(told["folder"])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
