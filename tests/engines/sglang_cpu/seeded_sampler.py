"""SGLang's own sampler drawing by seeds, its Triton kernel run by Triton's interpreter: what can be seen of seeds on a CPU.

A server that draws by them (--enable-deterministic-inference) does not start without a GPU: SGLang 0.5.17 has no
deterministic matrix products for CPUs. Run by SGLang's interpreter, in the environment that `run_sglang.py` makes.
"""

from __future__ import annotations

import importlib

import torch

sampler = importlib.import_module("sglang.srt.layers.sampler")  # of an environment that the type checker does not see
VOCAB = 320
NUM_TOKENS = 6
NUM_DRAWS = 1000
SEEDS = (0, 1, 1 + 2**32, 2**63 - 1)


def drawn(logprobs: torch.Tensor, seeds: list[int], position: int) -> list[int]:
    """One token for each seed, in one batch."""
    rows = logprobs.expand(len(seeds), -1).contiguous()
    positions = torch.full((len(seeds),), position)
    return sampler.multinomial_with_seed(rows, torch.tensor(seeds), positions).flatten().tolist()


def main() -> None:
    logprobs = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    answers = {seed: [drawn(logprobs, [seed], at)[0] for at in range(NUM_TOKENS)] for seed in SEEDS}
    assert len({tuple(answer) for answer in answers.values()}) == len(SEEDS), "all 64 bits of a seed count"
    crowd = [drawn(logprobs, list(SEEDS), at) for at in range(NUM_TOKENS)]
    assert [list(row) for row in zip(*crowd, strict=True)] == list(answers.values()), "whoever else is drawn for"
    found = torch.tensor(drawn(torch.tensor([[0.5, 0.3, 0.2]]).log(), list(range(NUM_DRAWS)), 0)).bincount() / NUM_DRAWS
    assert (found - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.05, found
    try:
        sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            logprobs.exp(), torch.tensor([VOCAB]), torch.tensor([1.0]), torch.tensor([0.1]), True, torch.tensor([1]),
            torch.tensor([0]),
        )  # fmt: skip
    except AssertionError:
        return
    raise SystemExit("min-p goes with seeds now: let sglang/server_args.py and docs/engines.md say so")


if __name__ == "__main__":
    main()
