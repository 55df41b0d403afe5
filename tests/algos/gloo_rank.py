"""One rank of a whole step, from rewards to the summed gradient; run as a program, or called with a world of one.

    python gloo_rank.py RANK WORLD STORE_FILE OUT_FILE

The policy is a table: log-prob of token y after x is log_softmax(table[x])[y]. The behaviour policy is another table.
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from myxa.algos.advantages import token_advantages, whiten
from myxa.algos.baselines import group_advantages
from myxa.algos.objective import Normaliser, ObjectiveConfig, TokenBatch, policy_objective
from myxa.algos.packing import plan_shards
from myxa.algos.segments import Segments

VOCAB = 7
NUM_SAMPLES = 11
CONFIG = ObjectiveConfig(
    kind="reinforce_pp", correction="decoupled", minibatches=2, entropy_coef=0.02, reduction="rollout"
)


def make_samples() -> tuple[list[torch.Tensor], list[torch.Tensor], np.ndarray, list[int]]:
    """Tokens, masks, rewards, group ids; groups of 3, 4, 2, 2 and one fully masked sample."""
    gen = torch.Generator().manual_seed(5)
    lengths = [3, 9, 1, 6, 4, 8, 2, 5, 7, 3, 6]
    tokens = [torch.randint(VOCAB, (n + 1,), generator=gen) for n in lengths]
    masks = [torch.rand(n, generator=gen) > 0.25 for n in lengths]
    masks[4][:] = False
    rewards = torch.randn(NUM_SAMPLES, generator=gen).numpy()
    return tokens, masks, rewards, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]


def train_step(rank: int, world: int, max_tokens: int) -> dict[str, torch.Tensor]:
    """Gradient and metrics of both mini-batches, summed over ranks (the table itself does not move)."""

    def add(tensor: torch.Tensor) -> torch.Tensor:
        if world > 1:
            dist.all_reduce(tensor)
        return tensor

    gen = torch.Generator().manual_seed(9)
    table = torch.randn(VOCAB, VOCAB, generator=gen, dtype=torch.float64, requires_grad=True)
    behaviour = torch.randn(VOCAB, VOCAB, generator=gen, dtype=torch.float64)
    proximal = table.detach() + 0.1 * torch.randn(VOCAB, VOCAB, generator=gen, dtype=torch.float64)
    tokens, masks, rewards, group_ids = make_samples()
    scalars = torch.from_numpy(group_advantages(CONFIG.kind, rewards, group_ids)).double()
    plan = plan_shards([len(t) for t in tokens], world, max_tokens, 2, group_ids)

    # Whitening spans the whole batch: every rank calls it once, with all tokens it owns.
    mine = [i for part in plan[rank] for micro in part for i in micro]
    flat = flatten(mine, masks)
    white_T = whiten(token_advantages(CONFIG.kind, scalars[mine], flat, gamma=0.9), flat.mask_T, add)
    lengths = [len(masks[i]) for i in mine]
    advantages = dict(zip(mine, torch.split(white_T, lengths), strict=True))

    total = {"loss": torch.zeros((), dtype=torch.float64)}
    for m in range(2):
        members = [i for r in plan for micro in r[m] for i in micro]
        normaliser = Normaliser(
            tokens=float(sum(int(masks[i].sum()) for i in members)),
            samples=float(sum(bool(masks[i].any()) for i in members)),
        )
        for micro in plan[rank][m]:
            batch = make_batch(micro, tokens, masks, advantages, (table, behaviour, proximal))
            result = policy_objective(batch, CONFIG, normaliser)
            result.loss.backward()
            for name, value in {"loss": result.loss.detach(), **result.sums}.items():
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + value
    gradient = torch.zeros_like(table) if table.grad is None else table.grad
    return {"gradient": add(gradient), **{name: add(value.clone()) for name, value in sorted(total.items())}}


def flatten(members: list[int], masks: list[torch.Tensor]) -> Segments:
    mask_T = torch.cat([masks[i] for i in members]) if members else torch.zeros(0)
    owners = [torch.full((len(masks[i]),), k) for k, i in enumerate(members)]
    return Segments.of(mask_T, torch.cat(owners) if owners else torch.zeros(0, dtype=torch.int64), len(members))


def make_batch(micro, tokens, masks, advantages, tables) -> TokenBatch:
    segments = flatten(micro, masks)
    empty = torch.zeros(0, dtype=torch.int64)
    before = torch.cat([tokens[i][:-1] for i in micro]) if micro else empty
    after = torch.cat([tokens[i][1:] for i in micro]) if micro else empty
    logs = [torch.log_softmax(table, -1)[before] for table in tables]
    live, behaviour, proximal = (log.gather(1, after[:, None])[:, 0] for log in logs)
    return TokenBatch(
        logprobs_T=live,
        behaviour_T=behaviour,
        advantages_T=torch.cat([advantages[i] for i in micro]) if micro else torch.zeros(0),
        mask_T=segments.mask_T,
        sample_T=segments.sample_T,
        num_samples=segments.num_samples,
        proximal_T=proximal,
        entropy_T=-(logs[0].exp() * logs[0]).sum(-1),
    )


def main(rank: int, world: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world,
        timeout=dt.timedelta(seconds=60),
    )  # fmt: skip
    try:
        result = train_step(rank, world, 12)
        if rank == 0:
            torch.save(result, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
