"""What `myxa plan` said, against what a real run then did: sizes of what it writes, processes, files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.run_job import Job
from tests.plan.planned import RUN, Site, plan

pytestmark = pytest.mark.timeout(240)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_checkpoints_export_and_actors_are_as_said(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = RUN.replace("num_steps = 20", "num_steps = 2").replace("checkpoint_every = 10", "checkpoint_every = 2")
    text = text.replace("every = 10\n", "every = 1\n").replace('kind = "grpo"', 'kind = "grpo"\ngroup_filter = "none"')
    code, answer = plan(site.write(text), capsys=capsys)
    assert (code, answer["problems"]) == (0, [])
    ended, said, run_dir = Job(site.folder).run(timeout_s=200)
    assert ended == 0, said
    parts = {part["name"]: part["num_bytes"] for part in answer["disk"]["parts"]}
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    # Beside parameters there are names, shapes and the tokenizer: a tenth of a model as small as this one.
    assert size_of(checkpoint) == pytest.approx(parts["checkpoints"], rel=0.1)
    weights = (run_dir / "export/model.safetensors").stat().st_size
    assert weights == pytest.approx(parts["export"], rel=0.05)
    logs = {path.name.removesuffix(".0.log") for path in (run_dir / "logs").glob("*.0.log")}
    actors = {start["actor"].replace("/", ".") for start in answer["starts"]}
    assert actors == {name for name in logs if not name.startswith("launcher")}
    listed = " ".join(answer["written"])
    for path in run_dir.iterdir():
        assert path.name in listed, f"{path.name} is not told of"
