"""The folder's tokenizer and chat template: equal to transformers', sandboxed, clear when something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.models.tiny import END_ID, PAD_ID, make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import DataError, ModelError
from myxa.core.samples import Message

PAIRS = [("system", "be brief"), ("user", "12+34=? é中 \n x"), ("assistant", "46"), ("tool", ""), ("user", "  why ")]
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TALK = [Message(role=role, content=content) for role, content in PAIRS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(path, "0p5m")
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_any_text_comes_back(folder: Path):
    ours = load_tokenizer(folder)
    for text in ("", "abc", "é中😀\x00\x7f", " \t\n", "a" * 1000):
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == 320
    assert ours.encode("<|end|>") == [END_ID]
    assert ours.decode([END_ID, ours.encode("x")[0], PAD_ID]) == "x"
    assert ours.decode([END_ID], skip_special=False) == "<|end|>"
    assert all(ours.decode([i], skip_special=False) for i in range(320))
    with pytest.raises(DataError):
        ours.decode([-1])


def test_a_turn_begins_as_its_conversation_does(folder: Path):
    """The rollout appends turns without encoding the past again, so a longer rendering must begin with a shorter one."""
    ours = load_tokenizer(folder)
    for n in range(1, len(TALK)):
        shorter = ours.render(TALK[:n], add_generation_prompt=False)
        assert ours.render(TALK[: n + 1], add_generation_prompt=False)[: len(shorter)] == shorter


def test_end_ids_come_from_tokenizer_then_configs(copied: Path):
    assert load_tokenizer(copied).eos_token_ids == (END_ID,)
    edit(copied / "generation_config.json", eos_token_id=[261, 262])
    edit(copied / "config.json", eos_token_id=263)
    assert load_tokenizer(copied).eos_token_ids == (END_ID, 261, 262, 263)
    edit(copied / "tokenizer_config.json", eos_token="<|tool|>")
    assert load_tokenizer(copied).eos_token_ids == (261, 262, 263)
    edit(copied / "tokenizer_config.json", eos_token=None)
    edit(copied / "generation_config.json", eos_token_id=None)
    edit(copied / "config.json", eos_token_id=None)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(copied)


def test_a_missing_or_broken_tokenizer_names_file_and_remedy(copied: Path):
    (copied / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(copied)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing -- .*save_pretrained"):
        load_tokenizer(copied)
    with pytest.raises(ModelError, match="model folder .*nowhere does not exist -- "):
        load_tokenizer(copied / "nowhere")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"vocab_size": 100}, r"token .* has id \d+, the embedding has 100 rows"),
        ("config.json", {"eos_token_id": 10**6}, r"end token 1000000 .* is beyond the embedding"),
        ("generation_config.json", {"eos_token_id": [1, 10**6]}, r"end token 1000000 .* is beyond the embedding"),
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}, r"eos_token '<nowhere>' .* is not in tokenizer.json"),
    ],
)
def test_e6_a_token_that_the_model_cannot_have_is_refused(tmp_path: Path, name: str, change: dict, message: str):
    make_tiny_model(tmp_path, "0p5m", seed=5)
    load_tokenizer(tmp_path)
    path = tmp_path / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


def with_part(folder: Path, **parts: object) -> Path:
    make_tiny_model(folder, "0p5m", seed=5)
    edit(folder / "tokenizer.json", **parts)
    return folder


def cut_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


REPLACE = {"type": "Replace", "pattern": {"String": "s"}, "content": "s" * 1000}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": ""}


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"pre_tokenizer": cut_by("(a+)+$|(sort|s|o|r|t)*x")}, "times 'a' takes .* retry-limit-in-match"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut_by("(q|qq)+$")]}}, "times 'q' takes"),
        ({"pre_tokenizer": cut_by(r"(?:\s|a)+(?:a|\s)+(?:\s|a)+$")}, "times 'a' takes .* to cut into tokens -- "),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, "times 'a' takes"),
        ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}}, "the normalizer may make a text"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 4}]}},
            "the normalizer may make a text",
        ),
        ({"decoder": {"type": "Sequence", "decoders": [REPLACE] * 4}}, "the decoder may make a text"),
        ({"normalizer": CHARSMAP}, "cannot read .*Cannot parse precompiled_charsmap"),
        ({"pre_tokenizer": cut_by("((")}, "cannot read .* Oniguruma error"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}}, "has dropout 0.5"),
    ],
)
def test_e10_a_tokenizer_that_hangs_grows_or_panics_is_refused(tmp_path: Path, parts: dict[str, Any], says: str):
    with pytest.raises(ModelError, match=says) as caught:
        load_tokenizer(with_part(tmp_path, **parts))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": CHARSMAP | {"precompiled_charsmap": "CAAAAGFiY2RlZmdo"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}},
    ],
)
def test_e10_a_text_on_which_the_library_panics_is_a_data_error(tmp_path: Path, parts: dict[str, Any]):
    ours = load_tokenizer(with_part(tmp_path, **parts))
    with pytest.raises(DataError, match=r"a text of 8 characters cannot be encoded by the model's tokenizer\.json: "):
        ours.encode("sort 123")


def test_patterns_that_models_have_are_quick_enough(tmp_path: Path):
    """Of Qwen2, GPT-2, Llama 3, GPT-4o and of numbers cut from the right."""
    words = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rest = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for pattern in (
        QWEN2_WORDS,
        r"'s|'t| ?\p{L}+| ?\p{N}+|\s+(?!\S)|\s+",
        words + rest,
        r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)",
    ):
        load_tokenizer(with_part(tmp_path, pre_tokenizer=cut_by(pattern)))
