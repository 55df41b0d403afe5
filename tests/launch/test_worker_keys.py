"""Keys on a run of two nodes: the job's key stays with the launchers, each process has one of its own."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from test_launch_two_nodes import see, two


def spec_of(process: psutil.Process) -> Path | None:
    """The file that told this process who it is."""
    path = process.environ().get("MYXA_WORKER_SPEC", "")
    return Path(path) if path else None


def test_processes_get_keys_of_their_own_and_never_the_jobs(tmp_path: Path, run):
    first, second = two(tmp_path, run)
    with second as node1, first as node0:
        see(node0, tmp_path)
        node0.until_serving("coordinator", "trainer/0", "trainer/1", "rollout/0", "rollout/1")
        public, secret = (tmp_path / "job.key").read_text().split()
        specs: dict[str, dict[str, object]] = {}
        for process in [*node0.children(), *node1.children()]:
            path = spec_of(process)
            if path is not None and path.exists():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
                spec = json.loads(path.read_text())
                specs[spec["actor"]["name"]] = spec
            assert secret not in " ".join([*process.environ().values(), *process.cmdline()])
        assert {"trainer/0", "trainer/1", "rollout/0", "rollout/1", "coordinator"} <= set(specs)
        keys = [str(spec["key"]) for spec in specs.values()]
        assert len({key.split()[0] for key in keys}) == len(keys), "no two processes share a key"
        assert all(len(key.split()) == 2 and secret not in key and public not in key for key in keys)
        logs = [path.read_text() for path in (node0.dir / "logs").iterdir() if path.is_file()]
        secrets = [secret, *(key.split()[1] for key in keys)]
        assert not any(hidden in text for hidden in secrets for text in [*logs, node0.output, node1.output])
        node0.signal(2)
        assert node0.ended() == 130, node0.evidence()
