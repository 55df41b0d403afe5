"""The layout of a micro-batch: every token once, every attention inside its own sequence, prompts shared when it pays."""

from __future__ import annotations

import itertools
import sys

import msgspec
import numpy as np
import pytest
import torch
from tests.backends.gang_rank import token_ids

from myxa.actors.backends import packed_attention
from myxa.actors.backends.torch_backend.layout import Layout, plan_layout
from myxa.core.samples import TrainSample


def sample(prompt: list[int], answer: list[int], mask: list[int] | None = None, index: int = 0) -> TrainSample:
    length = len(answer)
    return TrainSample(
        group_id=0, index=index, prompt_ids=np.asarray(prompt, np.int32), response_ids=np.asarray(answer, np.int32),
        loss_mask=np.asarray(mask if mask is not None else [1] * length, np.uint8),
        logprobs=np.zeros(length, np.float32), versions=np.zeros(length, np.int32), finish="stop", advantage=1.0,
    )  # fmt: skip


def draw(seed: int, count: int) -> list[TrainSample]:
    """Samples over few prompts, lengths from 1 to 40, masks with holes, some empty."""
    sys.stdout.write(f"seed {seed}\n")
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 99, int(rng.integers(1, 20))).tolist() for _ in range(4)]
    return [
        sample(
            prompts[int(rng.integers(4))],
            rng.integers(0, 99, length := int(rng.integers(1, 40))).tolist(),
            (rng.random(length) < rng.choice([0.0, 0.5, 1.0])).astype(int).tolist(),
            index,
        )
        for index in range(count)
    ]


def visible(layout: Layout) -> list[set[int]]:
    """For each packed token, the packed tokens it attends to, read off blocks and masks slot by slot."""
    seen: list[set[int]] = [set() for _ in range(layout.num_tokens)]
    real, index = set(layout.slots_T.tolist()), layout.index_S.tolist()
    start = 0
    for block in layout.blocks:
        lengths = [block.row_len] * block.num_rows if block.packed is None else block.packed.lengths
        assert block.packed is None or block.packed.bounds.tolist() == [0, *itertools.accumulate(lengths)]
        assert max(lengths) == block.row_len
        masks = None if block.mask_nLL is None else block.mask_nLL.squeeze(1).tolist()
        for row, length in enumerate(lengths):
            slots = range(start, start + length)
            start += length
            for q, slot in enumerate(slots):
                if slot not in real:
                    continue
                keys = [k for k in range(length) if (k <= q if masks is None else masks[row][q][k])]
                assert all(slots[k] in real for k in keys), "a real token must not attend to padding"
                seen[index[slot]] = {index[slots[k]] for k in keys}
    assert start == len(layout.index_S)
    return seen


@pytest.mark.parametrize("packs_rows", [False, True])
@pytest.mark.parametrize("linear_cost", [0.0, 30.0, 1e6])
@pytest.mark.parametrize("seed", range(4))
def test_each_loss_token_sees_exactly_its_own_context(seed: int, linear_cost: float, packs_rows: bool) -> None:
    samples = draw(seed, 24)
    layout = plan_layout(samples, range(len(samples)), linear_cost=linear_cost, packs_rows=packs_rows)
    assert sorted(layout.slots_T.tolist()) == sorted(set(layout.slots_T.tolist())), "one slot per token"
    seen = visible(layout)
    tokens, positions = layout.token_ids_T.tolist(), layout.positions_T.tolist()
    rows = layout.rows_N[layout.row_of_M].tolist()
    done: list[int] = []
    for k, i in enumerate(layout.members):
        part = slice(int(layout.offsets[k]), int(layout.offsets[k + 1]))
        columns = np.flatnonzero(samples[i].loss_mask)
        for column, row, target in zip(columns, rows[part], layout.targets_M[part], strict=True):
            place = len(samples[i].prompt_ids) + int(column)
            context = sorted((positions[t], tokens[t]) for t in seen[row])
            assert context == list(enumerate(token_ids(samples[i])[:place].tolist()))
            assert int(target) == token_ids(samples[i])[place]
        done.append(i)
    assert sorted(done) == [i for i, s in enumerate(samples) if s.loss_mask.any()]


def test_rows_of_unequal_lengths_are_packed_and_equal_ones_are_a_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rectangle has a faster kernel on some GPUs, which costs much for each new shape."""
    monkeypatch.setattr(packed_attention, "_planned", set())
    unequal = [sample([1, 2], [3] * length, index=length) for length in (9, 2, 5)]
    layout = plan_layout(unequal, range(3), linear_cost=None, packs_rows=True)
    (block,) = layout.blocks
    assert block.packed is not None
    assert block.packed.lengths == (10, 3, 6)
    assert layout.is_in_order
    assert layout.slots_T.tolist() == list(range(19))
    equal = plan_layout([unequal[0]] * 3, range(3), linear_cost=None, packs_rows=True)
    assert [(block.packed, block.num_rows, block.row_len) for block in equal.blocks] == [(None, 3, 10)]
    assert equal.is_in_order
    assert not plan_layout(unequal, range(3), linear_cost=None).is_in_order


@pytest.mark.parametrize(("capability", "is_named"), [((7, 5), True), ((9, 0), False)])
def test_a_gpu_that_runs_no_packed_rows_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], is_named: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", capability[0])
    assert packed_attention.flash_kernel(device, torch.float32, 64) is None, "padded rectangles, as everywhere"
    assert (packed_attention.flash_kernel(device, torch.bfloat16, 64) is None) == is_named
    assert ("compute capability 7.5" in caplog.text) == is_named


def test_only_the_first_shapes_of_rectangles_get_a_plan_and_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "_planned", set())
    kinds = {}
    for length in [*range(2, packed_attention.MAX_PLANS + 4)] * 2:
        samples = [sample([1], [3] * length, index=index) for index in range(3)]
        (block,) = plan_layout(samples, range(3), linear_cost=None, packs_rows=True).blocks
        assert kinds.setdefault(length, block.packed is None) == (block.packed is None)
        assert block.num_slots == 3 * length
    assert sum(kinds.values()) == packed_attention.MAX_PLANS


def test_a_prompt_is_shared_when_products_cost_more_than_attention() -> None:
    samples = [sample([1, 2, 3, 4, 5], [6, 7, 8], index=i) for i in range(8)]
    assert plan_layout(samples, range(8), linear_cost=1e6).num_tokens == 5 + 8 * 2
    assert plan_layout(samples, range(8), linear_cost=0.0).num_tokens == 8 * (5 + 2)


def test_a_long_answer_is_not_joined_to_a_row_of_others() -> None:
    long = [sample([1, 2], [3] * 4000, index=i) for i in range(2)]
    assert plan_layout(long, range(2), linear_cost=800.0).num_tokens == 2 * (2 + 3999)


def test_nothing_behind_the_last_loss_token_is_computed() -> None:
    layout = plan_layout([sample([1, 2], [3, 4, 5, 6], [1, 0, 0, 0])], [0], linear_cost=0.0)
    assert layout.token_ids_T.tolist() == [1, 2]
    assert layout.targets_M.tolist() == [3]


def test_rows_of_unlike_length_are_not_padded_to_one_rectangle() -> None:
    samples = [sample([1], [2] * 2000), *(sample([1, k], [2], index=k) for k in range(50))]
    layout = plan_layout(samples, range(51), linear_cost=0.0)
    slots = sum(b.num_rows * b.row_len for b in layout.blocks)
    assert slots < 1.4 * layout.num_tokens


@pytest.mark.parametrize("samples", [[], [sample([1, 2], [3, 4], [0, 0])]])
def test_a_micro_batch_without_loss_tokens_still_has_a_token(samples: list[TrainSample]) -> None:
    layout = plan_layout(samples, range(len(samples)), linear_cost=0.0)
    assert layout.num_tokens == 1
    assert layout.members == ()
    assert layout.targets_M.dtype == torch.int64
    assert not layout.targets_M.numel()


def test_what_tokens_were_drawn_from_lies_beside_them() -> None:
    kept = np.asarray([[7, 9, -1], [8, -1, -1], [-1, -1, -1]], np.int32)
    first = msgspec.structs.replace(sample([1, 2], [7, 8, 9], [1, 0, 1]), kept=kept.ravel())
    second = sample([1, 2], [5], index=1)
    assert plan_layout([second], [0], linear_cost=None).kept_MK is None
    found = plan_layout([first, second], [0, 1], linear_cost=1e9).kept_MK
    assert found is not None
    assert found.tolist() == [[7, 9, -1], [-1, -1, -1], [-1, -1, -1]]
