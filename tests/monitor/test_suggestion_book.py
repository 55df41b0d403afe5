"""Suggestions over a restart of the launcher: names stay, what a person decided holds; who looks writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.control.suggestions import BOOK_FILE, MAX_KEPT, Proposals, SuggestionBook
from myxa.launch.views.advice import Advice

CONCURRENCY = Advice("concurrency", 4, 16, "room for more", "rollout.max_groups", "myxa set concurrency=16")
STALENESS = Advice("max_staleness", 1, 2, "further ahead", "async.max_staleness", "myxa set max_staleness=2")
WORKERS = Advice("", 0, 4, "side by side", "reward.workers")


def test_the_same_proposal_keeps_its_name_and_nothing_is_written_for_it(tmp_path: Path) -> None:
    first, second = SuggestionBook(tmp_path).propose([CONCURRENCY, STALENESS])
    again = SuggestionBook(tmp_path).propose([STALENESS, WORKERS])
    assert again[0] == second
    assert len({first.id, second.id, again[1].id}) == 3
    assert not list(tmp_path.iterdir())


def test_what_one_saw_can_be_decided_although_another_saw_other_things(tmp_path: Path) -> None:
    book, shown = SuggestionBook(tmp_path), Proposals()
    (suggestion,) = book.propose([CONCURRENCY])
    shown.show([suggestion])
    shown.show(book.propose([STALENESS, WORKERS]))
    assert shown.find(suggestion.id) == suggestion
    shown.close(suggestion.id)
    with pytest.raises(ConfigError, match="no open suggestion"):
        shown.find(suggestion.id)
    shown.show([suggestion])
    shown.show(book.propose([Advice("concurrency", 4, 17 + n, "", "rollout.max_groups") for n in range(MAX_KEPT)]))
    with pytest.raises(ConfigError, match="no open suggestion"):
        shown.find(suggestion.id)


def test_a_pinned_knob_is_not_proposed_until_it_is_unpinned(tmp_path: Path) -> None:
    book = SuggestionBook(tmp_path)
    book.pin("concurrency")
    book.pin("concurrency")
    assert [s.knob for s in SuggestionBook(tmp_path).propose([CONCURRENCY, STALENESS])] == ["max_staleness"]
    assert not SuggestionBook(tmp_path).allows(CONCURRENCY)
    again = SuggestionBook(tmp_path)
    again.unpin("concurrency")
    assert again.allows(CONCURRENCY)
    with pytest.raises(ConfigError, match="'concurrency' is not pinned"):
        again.unpin("concurrency")


def test_what_was_forbidden_does_not_come_again_nor_anything_beyond(tmp_path: Path) -> None:
    book = SuggestionBook(tmp_path)
    (suggestion,) = book.propose([CONCURRENCY])
    assert book.allows(suggestion)
    assert book.forbid(suggestion) == suggestion
    assert not book.allows(suggestion)
    book = SuggestionBook(tmp_path)
    assert not book.propose([CONCURRENCY])
    assert not book.allows(Advice("concurrency", 8, 32, "more still", "rollout.max_groups"))
    assert book.allows(Advice("concurrency", 4, 8, "a little", "rollout.max_groups"))
    assert book.allows(Advice("concurrency", 32, 16, "back", "rollout.max_groups"))
    with pytest.raises(ConfigError, match=r"did you mean \"concurrency\""):
        book.allow("concurency")
    assert book.allow("concurrency") == 1
    assert book.allows(CONCURRENCY)


def test_lines_of_the_run_file_can_be_forbidden_too(tmp_path: Path) -> None:
    book = SuggestionBook(tmp_path)
    (suggestion,) = book.propose([WORKERS])
    book.forbid(suggestion)
    assert not book.allows(WORKERS)
    assert book.allow("reward.workers") == 1


def test_a_file_that_is_not_ours_is_told_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / BOOK_FILE).write_text('{"pins": 3}')
    with pytest.raises(ConfigError, match="move the file away"):
        SuggestionBook(tmp_path)
    assert (tmp_path / BOOK_FILE).read_text() == '{"pins": 3}'
