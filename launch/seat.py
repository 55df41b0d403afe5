"""The operator's seat of a run: opens the control sockets, leaves a note where they are, takes both away at the end.

The launcher of node 0 has it open from the moment that the registry is there until the last process ended, so that
`myxa ps` and `myxa logs` also work while the run starts and while it ends.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from ..actors.coordinator.audit import AUDIT_FILE, AuditLog
from ..core.config import RunConfig
from ..core.errors import ConfigError
from .chaos import chaos_of
from .control.autopilot import autopilot
from .control.client import NOTE, ControlNote
from .control.dispatcher import Dispatcher, all_verbs
from .control.server import ControlServer
from .control.tcp import TcpServer
from .control.verb import VerbContext
from .runtime_dir import RuntimeDir

CONTROL_SOCKET = "control.sock"
VIEW_SOCKET = "view.sock"
_log = logging.getLogger("myxa.control")


@contextlib.asynccontextmanager
async def control_seat(context: VerbContext, runtime: Path) -> AsyncGenerator[ControlNote | None]:
    """While this lasts, the run can be spoken to; None: the run file says that it shall not.

    Raises ConfigError and LaunchError if the sockets cannot be made as the run file says.
    """
    if not context.config.control.socket:
        yield None
        return
    dispatcher = Dispatcher(context, all_verbs(), AuditLog(context.run_dir.path / AUDIT_FILE).append)
    with contextlib.ExitStack() as stack:
        gid, view_folder = _view_place(context.config, runtime, stack)
        note = ControlNote(
            run_dir=str(context.run_dir.path.resolve()),
            control=str(runtime / CONTROL_SOCKET),
            view=str(view_folder / VIEW_SOCKET),
            pid=os.getpid(),
        )
        server = ControlServer(dispatcher, Path(note.control), Path(note.view), view_gid=gid)
        remote = TcpServer(dispatcher, context.config) if context.config.control.tcp else None
        try:
            await server.open()
            if remote is not None:
                note = msgspec.structs.replace(note, tcp=remote.open(), tcp_key=remote.public)
            for folder in (runtime, context.run_dir.path):
                note.save(folder)
            async with (
                autopilot(context),
                chaos_of(context.chaos, context),
                _dashboard(note, context.config.control.dashboard_port) as url,
            ):
                yield msgspec.structs.replace(note, dashboard=url)  # not in the file: the URL holds a secret
        finally:
            (context.run_dir.path / NOTE).unlink(missing_ok=True)
            if remote is not None:
                await remote.close()
            await server.close()


@contextlib.asynccontextmanager
async def _dashboard(note: ControlNote, port: int) -> AsyncGenerator[str]:
    """Serves the dashboard and gives its URL; empty for `port` -1: there is none."""
    if port < 0:
        yield ""
        return
    from .web.dashboard import run_dashboard  # aiohttp is needed here only

    async with run_dashboard(note, port) as url:
        yield url


def _view_place(config: RunConfig, runtime: Path, stack: contextlib.ExitStack) -> tuple[int, Path]:
    """The group that may look (-1: none), and the folder of the socket for it."""
    group = config.control.view_group
    if not group:
        return -1, runtime
    try:
        gid = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"control.view_group: there is no group {group!r} here", remedy="see `getent group`"
        ) from None
    folder = stack.enter_context(RuntimeDir()).path
    try:
        os.chown(folder, -1, gid)
        folder.chmod(0o750)
    except OSError as error:
        raise ConfigError(
            f"control.view_group: {folder} cannot be given to {group!r}: {error.strerror}", remedy="be a member of it"
        ) from error
    return gid, folder
