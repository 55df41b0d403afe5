"""Each recipe of examples/recipes is accepted by `myxa plan` with the true sizes of its model, and is listed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.deepseek import DEEPSEEK_V3, MOONLIGHT
from tests.plan.memory_cases import GLM45_AIR, LLAMA31_8B, QWEN3_30B, SHAPES

from myxa.actors.models.tiny import tiny_config, write_tokenizer
from myxa.launch.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted((EXAMPLES / "recipes").glob("*.toml"))
CONFIGS: dict[str, Any] = {
    "Qwen3-0.6B": SHAPES["0.6B"].source,
    "Qwen3-1.7B": SHAPES["1.7B"].source,
    "Qwen3-4B": SHAPES["4B"].source,
    "Qwen3-8B": SHAPES["8B"].source,
    "Qwen3-30B-A3B": QWEN3_30B.source,
    "Llama-3.1-8B": LLAMA31_8B,
    "Moonlight-16B-A3B": MOONLIGHT,
    "GLM-4.5-Air": GLM45_AIR,
    "DeepSeek-V3": DEEPSEEK_V3,
}


def rows() -> Iterator[tuple[str, str, int]]:
    """File, model and GPUs of each row of the table."""
    text = (EXAMPLES / "README.md").read_text().partition("## Recipes")[2]
    for line in text.splitlines():
        if found := re.match(r"\| \[([^\]]*)\]\(recipes/\1\.toml\) \| ([^|]*) \| [^|]* \| (\d+) \| [^|]+ \|$", line):
            yield found[1], found[2].strip(), int(found[3])


def test_the_table_lists_every_recipe_once() -> None:
    assert sorted(name for name, _, _ in rows()) == [path.stem for path in RECIPES]


@pytest.mark.parametrize(("name", "model", "num_gpus"), list(rows()), ids=lambda value: str(value))
def test_a_recipe_can_be_planned(
    name: str, model: str, num_gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path, tiny_config("1m"))
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIGS[model])))
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n' * 1024)
    told = ["--elsewhere", "--device-gib", "141", "--json"]
    for key, value in {"model.path": tmp_path, "data.train": data, "eval.data": data}.items():
        told += ["--set", f"{key}={value}"]
    nodes = re.search(r"(\d+)nodes$", name)
    status = main(["plan", str(EXAMPLES / "recipes" / f"{name}.toml"), "--nnodes", nodes[1] if nodes else "1", *told])
    said = json.loads(capsys.readouterr().out)
    assert status == 0, said["problems"]
    assert [one for one in said["problems"] if "safetensors" not in one["message"]] == []
    assert said["memory"], "every device is accounted for"
    assert sum(device.startswith("GPU") for node in said["placement"] for device in node["devices"]) == num_gpus
