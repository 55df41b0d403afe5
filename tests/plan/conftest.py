from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plan.planned import Site, make_site


@pytest.fixture(scope="session")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def site(whole_site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The current folder is the site's, as for somebody who types the command there."""
    monkeypatch.chdir(whole_site.folder)
    yield whole_site
    (Path(whole_site.folder) / "run.toml").unlink(missing_ok=True)
