"""The file system of the run directory is full, to the last block: a real one, a tmpfs that a namespace of the test's own
has mounted, filled by a file in mid-run. What happens is in full_disk.py."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

SCENE = Path(__file__).with_name("full_disk.py")
MOUNT = 'mount -t tmpfs -o size=320m myxa-test "$0" && exec "$@"'
"""What a run is going to write is looked at when it begins, and is less than that."""
WAYS = (("unshare", "--user", "--map-root-user", "--mount"), ("unshare", "--mount"))


@functools.cache
def way_in() -> tuple[tuple[str, ...], str]:
    """How to get a mount namespace of our own; else nothing, and why."""
    why = ""
    for way in WAYS:
        try:
            tried = subprocess.run(
                [*way, "sh", "-c", MOUNT, "/mnt", "true"], capture_output=True, text=True, timeout=30, check=False
            )
        except OSError as error:
            return (), str(error)
        if tried.returncode == 0:
            return way, ""
        why = tried.stderr.strip()
    return (), why


def test_e08_a_journal_waits_for_a_full_disk_and_a_run_on_one_pauses_and_continues_once_there_is_room(tmp_path: Path):
    way, why = way_in()
    if not way:
        pytest.skip(f"nothing can be mounted here: {why}")
    (tmp_path / "runs").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [*way, "sh", "-c", MOUNT, str(tmp_path / "runs"), sys.executable, str(SCENE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=env)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
