"""A run with a critic cannot go on from a checkpoint without one, nor the other way round: told before it starts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan.planned import RUN, Site, plan

from myxa.actors.checkpoints.folder import Manifest, begin, commit, identity_of, rank_file, writer_of
from myxa.actors.models.hf_folder import read_config
from myxa.core.files import describe_file


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("critic", [{}, {"num_layers": 2, "num_updates": 7}], ids=["without", "with"])
def test_it_goes_on_as_it_began(
    site: Site, capsys: pytest.CaptureFixture[str], critic: dict[str, Any], enabled: bool
) -> None:
    folder = site.folder / f"version_{1 + bool(critic)}"
    if not folder.exists():
        extra: dict[str, Any] = {"version": 3}
        partial = begin(folder, writer_of(extra))
        (partial / rank_file(0)).write_bytes(b"x")
        files = (describe_file(partial / rank_file(0)),)
        model = identity_of(read_config(site.folder / "model"))
        commit(
            folder,
            Manifest(format=1, model=model, world_size=1, num_updates=7, files=files, extra=extra, critic=critic),
        )
    text = RUN.replace('kind = "grpo"', 'kind = "ppo"')
    text = text.replace("checkpoint_every = 10", f'checkpoint_every = 10\nresume = "{folder.name}"')
    text += "[critic]\nenabled = true\n" if enabled else ""
    _, answer = plan(site.write(text), capsys=capsys)
    errors = [one for one in answer["problems"] if one["severity"] == "error"]
    assert [one["key"] for one in errors] == ([] if bool(critic) == enabled else ["critic.enabled"]), errors
    for error in errors:
        assert f"has {'a' if critic else 'no'} critic" in error["message"]
        assert f"enabled = {str(enabled).lower()}" in error["message"]
