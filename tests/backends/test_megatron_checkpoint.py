"""Which rank answers for which file of a checkpoint that several ranks write."""

from __future__ import annotations

from pathlib import Path

from myxa.actors.backends.megatron.checkpoint_files import files_of, list_of


def test_every_file_is_one_rank_s_and_lists_that_come_early_are_nobody_s(tmp_path: Path) -> None:
    written = {
        0: [".metadata", "__0_0.distcp", "common.pt", "metadata.json", "rank-00000.safetensors"],
        2: ["__2_0.distcp", "__2_1.distcp", "rank-00002.safetensors"],
    }
    for names in written.values():
        for name in names:
            (tmp_path / name).write_bytes(b"x")
    for rank in (1, 2):  # faster than rank 0
        (tmp_path / list_of(rank)).write_bytes(b"[]")
    for name in (".tmpXkKApD", ".metadata.tmp"):  # under way: renamed by whoever writes it
        (tmp_path / name).write_bytes(b"")
    assert {rank: [p.name for p in files_of(tmp_path, rank)] for rank in range(3)} == {**written, 1: []}
