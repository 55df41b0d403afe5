"""The reference model that rollout actors ask, by the run file. Part of the composition root: beside `program.py`, the
only place that names the concrete classes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...core.clock import Clock
from ...core.config import RunConfig
from ...core.config.learning import RECORDED_REFERENCE
from ...core.protocols import Engine, Tokenizer

if TYPE_CHECKING:
    from ...actors.rollout.judging import Reference


def served_reference(config: RunConfig, engine: Engine | None, tokenizer: Tokenizer, clock: Clock) -> Reference | None:
    """None where the trainer keeps it, or there is none. Raises ConfigError if the servers' key is not there."""
    algo = config.algo
    if not algo.ref_urls:
        return None
    if algo.ref_urls == RECORDED_REFERENCE:
        from ...actors.engines.recorded import RecordedEngine
        from ...actors.engines.recorded_reference import RecordedReference

        assert isinstance(engine, RecordedEngine)  # the run file was checked
        return RecordedReference(engine)
    from ...actors.reference.served import ServedReference  # a client for HTTP
    from ...actors.reference.servers import ReferenceServers, key_from

    servers = ReferenceServers(
        algo.ref_urls,
        tokenizer=tokenizer,
        model_path=config.model.path,
        timeout_s=algo.ref_timeout_s,
        key=key_from(os.environ, algo.ref_key_env),
    )
    return ServedReference(servers, config.reward, clock)
