"""Scores of a vocabulary that is cut in slices are those of the dense formula, gradients included."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from myxa.actors.backends import vocab_scores
from myxa.actors.backends.vocab_scores import Temperature, VocabSlice, score_rows, score_tokens

WIDTH, VOCAB, ROWS = 12, 37, 29


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def dense(hidden: Tensor, head: Tensor, targets: Tensor, temperature: Temperature) -> Tensor:
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    all_log_p = (hidden @ head.t() / divisor).float().log_softmax(dim=-1)
    entropy = -(all_log_p.exp() * all_log_p).sum(dim=-1)
    return torch.stack([all_log_p.gather(1, targets[:, None])[:, 0], entropy], dim=1)


@pytest.mark.parametrize("chunk", [1 << 26, VOCAB * 4, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.4, 2.0, ROWS)], ids=["1", "0.7", "each its own"])
@pytest.mark.parametrize("keeps", [False, True])
def test_scores_and_gradients_of_one_slice(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: Temperature, *, keeps: bool
) -> None:
    monkeypatch.setitem(vocab_scores.CHUNK_LOGITS, "cpu", chunk)
    hidden, head, targets = inputs(5)
    weights = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(6))
    grads = []
    for scores in (
        dense(hidden, head, targets, temperature),
        score_rows(
            hidden,
            head,
            targets,
            VocabSlice(0, VOCAB, None),
            temperature,
            needs_entropy_grad=True,
            keeps_logits=keeps,
        ),
    ):
        grads.append((scores, *torch.autograd.grad((scores * weights).sum(), (hidden, head))))
    for mine, right in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 26, VOCAB * 4])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.4, 2.0, ROWS)], ids=["0.7", "each its own"])
def test_log_probs_over_the_tokens_that_were_kept_and_entropies_over_all(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: Temperature
) -> None:
    monkeypatch.setitem(vocab_scores.CHUNK_LOGITS, "cpu", chunk)
    hidden, head, targets = inputs(15)
    generator = torch.Generator().manual_seed(16)
    is_kept = torch.rand(ROWS, VOCAB, generator=generator) < 0.3
    is_kept[torch.arange(ROWS), targets] = True
    is_kept[::3] = True
    kept = torch.full((ROWS, VOCAB), -1)
    for row in range(ROWS):
        if row % 3:  # the others are drawn from all
            ids = torch.nonzero(is_kept[row]).squeeze(1)
            kept[row, : len(ids)] = ids
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    z = (hidden @ head.t() / divisor).float()
    right = z.masked_fill(~is_kept, -torch.inf).log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    scores = score_tokens(hidden, head, targets, temperature, kept_MK=kept)
    torch.testing.assert_close(scores.logprobs_M, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy_M, dense(hidden, head, targets, temperature)[:, 1], rtol=1e-5, atol=1e-5)
    weights = torch.randn(ROWS, generator=generator)
    found, wanted = (torch.autograd.grad((x * weights).sum(), (hidden, head)) for x in (scores.logprobs_M, right))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_entropy_passes_no_gradient_unless_asked() -> None:
    hidden, head, targets = inputs(7)
    whole = VocabSlice(0, VOCAB, None)
    scores = score_rows(hidden, head, targets, whole, 1.0)
    (own,) = torch.autograd.grad(scores.sum(), hidden, retain_graph=True)
    (right,) = torch.autograd.grad(dense(hidden, head, targets, 1.0)[:, 0].sum(), hidden)
    torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)


def test_a_second_backward_pass_gives_what_the_first_gave() -> None:
    hidden, head, targets = inputs(12)
    scores = score_rows(hidden, head, targets, VocabSlice(0, VOCAB, None), 0.8, keeps_logits=True)
    first, second = (torch.autograd.grad(scores[:, 0].sum(), (hidden, head), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keeps", [False, True])
def test_rows_that_pad_the_table_count_for_nothing_and_get_no_gradient(*, keeps: bool) -> None:
    hidden, head, targets = inputs(8)
    padded = torch.cat([head.detach(), torch.full((3, WIDTH), 9.0, dtype=head.dtype)]).requires_grad_()
    scores = score_rows(hidden, padded, targets, VocabSlice(0, VOCAB, None), 1.0, keeps_logits=keeps)
    torch.testing.assert_close(scores, dense(hidden, head, targets, 1.0), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(scores[:, 0].sum(), padded)
    assert not grad[VOCAB:].any()
    assert grad[:VOCAB].any()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_pass_without_gradient_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, *, keeps: bool) -> None:
    monkeypatch.setitem(vocab_scores.CHUNK_LOGITS, "cpu", VOCAB * 4)
    hidden, head, targets = inputs(9, torch.bfloat16)
    whole = VocabSlice(0, VOCAB, None)
    scores = score_rows(hidden, head, targets, whole, 0.9, keeps_logits=keeps)
    with torch.no_grad():
        assert torch.equal(score_rows(hidden, head, targets, whole, 0.9), scores)


def test_no_rows_give_no_scores_and_gradients_of_zero() -> None:
    hidden, head, targets = inputs(10)
    scores = score_rows(hidden[:0], head, targets[:0], VocabSlice(0, VOCAB, None), 1.0)
    assert scores.shape == (0, 2)
    grads = torch.autograd.grad(scores.sum(), (hidden, head))
    assert not any(grad.any() for grad in grads)


def test_slices_joined_are_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slices of unequal real size, one without any; joined here in one process in the collective's place."""
    hidden, head, targets = inputs(11)
    sizes = [20, 17, 0]
    starts = [0, 20, 37]
    facts = torch.stack(
        [
            vocab_scores._row_facts(hidden @ head[a : a + n].t(), targets - a, 1.3)
            for a, n in zip(starts, sizes, strict=True)
        ]
    )
    _, scores = vocab_scores._join(facts)
    torch.testing.assert_close(scores, dense(hidden, head, targets, 1.3), rtol=1e-5, atol=1e-5)


def test_a_compiled_function_is_made_once_for_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """None and one, too: a rank without samples has such, and a compiler makes each of them a kind of its own."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    doubled = vocab_scores.fused(lambda x: x * 2)
    for num_rows in (5, 9, 1, 0, 700):
        assert torch.equal(doubled(torch.ones(num_rows, 3)), torch.full((num_rows, 3), 2.0))
    assert len(graphs) == 1
