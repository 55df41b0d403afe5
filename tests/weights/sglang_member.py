"""A process that joins a group as SGLang 0.5.17 does: default group of its own, then one more main group by torch's
internal builder on a TCP store; then it receives flat buffers and says what they hash to.

    python sglang_member.py ADDRESS PORT RANK WORLD_SIZE GROUP NUM_BYTES...
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d  # its internals, as SGLang uses them
torch_dist: Any = dist

address, port, rank, world_size, group = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
limit = timedelta(seconds=60)
dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
meeting = c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=limit)
store, _, _ = next(meeting)
store.set_timeout(limit)
member, _ = c10d._new_process_group_helper(
    world_size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(group, store),
    group_name=group, backend_options=None, timeout=limit,
)  # fmt: skip
c10d._world.pg_group_ranks[member] = {i: i for i in range(world_size)}
print("joined", flush=True)
for num_bytes in map(int, sys.argv[6:]):
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=member)
    print(hashlib.sha256(bytes(flat.numpy())).hexdigest(), flush=True)
