"""The run files of examples/ load, and say what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.toml")), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_it_loads(file: Path) -> None:
    config = load_config([file], [])
    assert config.run.name
    assert config.roles.trainer.kind == "torch" or config.roles.trainer.device_ids
