"""Tiny tokenizers in every layout that model folders come in, one folder each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

MARKS = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<bos>", "<eos>", "<pad>", "<mask>",
)  # fmt: skip
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def special(text: str, **flags: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, **{"normalized": False, "special": True, **flags})


def byte_level(marks: tuple[str, ...] = MARKS, *, words: bool = False) -> tokenizers.Tokenizer:
    """Every byte a token, some merges, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("ab", "a"), ("\u010a", "\u010a"), ("\u0120", "a"), (":", "\u010a"), (">", "\u010a")]
    vocab = [*alphabet, *(left + right for left, right in pairs)]
    bpe = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocab)}, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.add_special_tokens([special(mark) for mark in marks])
    return bpe


def piece_like(*, is_legacy: bool) -> tokenizers.Tokenizer:
    """As converted from SentencePiece: spaces are letters, bytes stand in for what is unknown, BOS by the processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdeforstu0123456789?:.<>|/[]"]
    pairs = [("▁", "a"), ("a", "b"), ("s", "t")]
    pieces += [left + right for left, right in pairs]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    bpe = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if is_legacy:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 $B:1", special_tokens=[("<s>", 1)]
    )
    bpe.add_special_tokens([special(mark) for mark in MARKS])
    return bpe


def truncated_and_padded() -> tokenizers.Tokenizer:
    tokenizer = byte_level(words=True)
    tokenizer.enable_truncation(max_length=7, direction="left")
    tokenizer.enable_padding(length=64, pad_id=3, pad_token="</s>", direction="left")
    return tokenizer


def lowercasing() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def flags(text: str, **more: bool) -> dict[str, Any]:
    return {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **more}


def of_config(**settings: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": settings}


def of_model(model_type: str, **more: Any) -> dict[str, Any]:
    return {"config.json": {"model_type": model_type, **more}}


modern, legacy = partial(piece_like, is_legacy=False), partial(piece_like, is_legacy=True)
DECODER = {
    "265": flags("<|im_start|>", special=True, lstrip=True), "266": flags("<|im_end|>", special=True, rstrip=True),
    "290": flags("<|extra|>", special=False, normalized=True), "291": flags("</s>", special=True),
}  # fmt: skip
FOLDERS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "plain": (byte_level, of_config(**CLASS, **NAMED)),
    "no_config": (byte_level, {"special_tokens_map.json": {"eos_token": "</s>"}}),
    "special_tokens_map_only": (byte_level, of_config(**CLASS, eos_token="<|im_end|>") | {"special_tokens_map.json":
        {**NAMED, "bos_token": flags("<s>"), "additional_special_tokens": ["<|new|>"]}}),
    "truncated_and_padded": (truncated_and_padded, of_config(**CLASS, **NAMED, model_max_length=5)),
    "sentence_pieces": (modern, of_config(**CLASS, **NAMED, add_bos_token=True, add_eos_token=True)),
    "llama_class": (legacy, of_config(tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True,
        model_max_length=99)),
    "llama_class_legacy": (legacy, of_config(tokenizer_class="LlamaTokenizerFast", legacy=True, **NAMED)),
    "gemma_class": (modern, of_config(tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>",
        unk_token="<unk>")),
    "qwen_class": (byte_level, of_model("qwen3") | of_config(tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>",
        pad_token="<|endoftext|>")),
    "qwen_model_alone": (partial(byte_level, MARKS[:5]), of_model("qwen3", eos_token_id=266)),
    "qwen2_model": (byte_level, of_model("qwen2") | of_config(**CLASS, **NAMED)),
    "gpt2_class": (byte_level, of_config(tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>",
        eos_token="<|im_end|>", add_prefix_space=False)),
    "gpt2_class_with_spaces": (lowercasing, of_model("qwen3") | of_config(tokenizer_class="GPT2TokenizerFast",
        add_prefix_space=True)),
    "gpt_neox_class": (byte_level, of_config(tokenizer_class="GPTNeoXTokenizer", eos_token="<|endoftext|>",
        pad_token="<pad>", add_bos_token=True)),
    "bloom_class": (partial(byte_level, words=True), of_config(tokenizer_class="BloomTokenizerFast", **NAMED)),
    "class_of_model_config": (byte_level, of_model("llama", tokenizer_class="GPT2Tokenizer")
        | of_config(eos_token="<|im_end|>")),
    "added_tokens_json": (partial(byte_level, MARKS[:6]), of_config(**{**CLASS, **NAMED, "eos_token": "<|eot_id|>"})
        | {"added_tokens.json": {"<|eot_id|>": 268, "<think>": 270, "ab ": 269}}),
    "added_tokens_decoder": (byte_level, of_config(**{**CLASS, **NAMED, "added_tokens_decoder": DECODER,
        "additional_special_tokens": ["<|one|>", "<|two|>"], "bos_token": {"__type": "AddedToken", **flags("<s>")}})
        | {"special_tokens_map.json": {"bos_token": "<unk>"}}),
    "own_names": (byte_level, of_config(**CLASS, **NAMED, image_token="<|image|>",
        extra_special_tokens={"boi_token": "<|boi|>"})),
    "special_tokens_are_split": (byte_level, of_config(**CLASS, **NAMED, split_special_tokens=True)),
}  # fmt: skip


def write(name: str, folder: Path) -> None:
    make, files = FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    for file, value in {**of_model("llama"), **files}.items():
        (folder / file).write_text(json.dumps(value))


LAYOUTS: Mapping[str, Callable[[Path], None]] = {name: partial(write, name) for name in FOLDERS}
plain, qwen_class = LAYOUTS["plain"], LAYOUTS["qwen_class"]
