"""The engine that answers from the dumps that are a run's data. Part of the composition root: beside `program.py`, the
only place that names the concrete classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.errors import DataError
from ...core.protocols import Tokenizer

if TYPE_CHECKING:
    from ...actors.engines.recorded import RecordedEngine, Recordings
    from ...actors.models.model_config import ModelConfig

FIRST_GROUPS = 50
"""Of each dump: looked at here. Those of another model or template differ from the first one on."""


def recorded_engine(name: str, config: RunConfig, model: ModelConfig, tokenizer: Tokenizer) -> RecordedEngine:
    """Raises DataError for a file that is no dump, or whose prompts this run's tokenizer or chat template writes
    otherwise than they were asked."""
    from ...actors.data.recorded_groups import RecordedGroups
    from ...actors.data.recorded_terms import terms_of
    from ...actors.engines.recorded import RecordedEngine, RecordedOptions, Recordings

    terms, sources = terms_of(config), dict[str, Recordings]()
    for _, value in config.data_files():
        for source in parse_sources(value):
            file = RecordedGroups(source.path, terms)
            sources[str(source)] = found = Recordings(file, source.rows(file.num_rows))
            _check_prompts(found, tokenizer)
    options = RecordedOptions(
        vocab_size=model.vocab_size,
        context_length=config.engine.context_length or model.context_length,
        max_running=config.engine.max_running,
        end_ids=frozenset(tokenizer.eos_token_ids),
        name=name,
    )
    return RecordedEngine(sources, options)


def _check_prompts(recordings: Recordings, tokenizer: Tokenizer) -> None:
    from ...actors.data.row_file import RowError
    from ...actors.workflows.turn_renderer import TurnRenderer

    renderer = TurnRenderer(tokenizer)
    for row in recordings.rows[:FIRST_GROUPS]:
        try:
            group = recordings.file.group(row)
        except RowError:  # told, or left out, by who reads the data
            continue
        asked, now = group.samples[0].prompt_ids, renderer.prompt(group.prompt)
        if not np.array_equal(asked, now):
            common = min(len(asked), len(now))
            at = next(iter(np.flatnonzero(asked[:common] != now[:common]).tolist()), common)
            raise DataError(
                f"{recordings.file.place(row)}: its prompt was asked by {len(asked)} tokens, this run would ask by "
                f"{len(now)}, others from token {at} on",
                remedy="name the model that it was recorded with (model.path), and the same data.apply_chat_template "
                "and data.chat_template_kwargs",
            )
