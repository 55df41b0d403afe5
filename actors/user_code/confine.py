"""The last program before the command, inside the namespaces that `bwrap` made, if any: it gives up rights for good.

    python -I -S confine.py <what is given up, JSON> <command and its arguments>

It stands for itself: it runs under interpreters that lack this package, and starts within milliseconds.
"""

import ctypes
import json
import os
import resource
import sys

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
libc = ctypes.CDLL(None, use_errno=True)


def listen_for_gateway(channel: int, port: int) -> None:
    """Send the actor a socket that listens on this loopback: the only way out of it."""
    import socket  # which takes as long as all else

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
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")


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


def main() -> None:
    told, command = json.loads(sys.argv[1]), sys.argv[2:]
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
