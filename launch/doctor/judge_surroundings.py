"""Names, ports, what earlier runs left, servers that are open to others. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .check import Judge, MachineCheck, error, ok, warning
from .machine_facts import MachineFacts

LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost", "::1"})


def hostname(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Other nodes are told this name."""
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
    """Runs of this user on this host: those that go on, and what others left."""
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
    """An SGLang server without a key takes weights from anybody who reaches it."""
    for server in facts.servers:
        if server.has_key and server.host in LOCAL_HOSTS:
            continue
        name = f"sglang {server.pid}"
        if not server.has_key and server.host not in LOCAL_HOSTS:
            yield error(
                name,
                f"listens on {server.host} without a key: whoever reaches it can load weights and stop it",
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


JUDGES: tuple[Judge, ...] = (hostname, ports, runs, servers)
