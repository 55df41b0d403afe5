"""Tiny tokenizers in every layout that model folders come in, one folder each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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


def write(folder: Path, tokenizer: tokenizers.Tokenizer, files: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"config.json": {"model_type": "llama"}, **files}.items():
        if value is not None:
            (folder / name).write_text(json.dumps(value))


def plain(folder: Path) -> None:
    write(folder, byte_level(), {"tokenizer_config.json": {**CLASS, **NAMED}})


def no_config(folder: Path) -> None:
    write(folder, byte_level(), {"special_tokens_map.json": {"eos_token": "</s>"}})


def special_tokens_map_only(folder: Path) -> None:
    bos = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    files = {
        "tokenizer_config.json": {**CLASS, "eos_token": "<|im_end|>"},
        "special_tokens_map.json": {**NAMED, "bos_token": bos, "additional_special_tokens": ["<|new|>"]},
    }
    write(folder, byte_level(), files)


def truncated_and_padded(folder: Path) -> None:
    tokenizer = byte_level(words=True)
    tokenizer.enable_truncation(max_length=7, direction="left")
    tokenizer.enable_padding(length=64, pad_id=3, pad_token="</s>", direction="left")
    write(folder, tokenizer, {"tokenizer_config.json": {**CLASS, **NAMED, "model_max_length": 5}})


def sentence_pieces(folder: Path) -> None:
    files = {"tokenizer_config.json": {**CLASS, **NAMED, "add_bos_token": True, "add_eos_token": True}}
    write(folder, piece_like(is_legacy=False), files)


def llama_class(folder: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "model_max_length": 99}
    write(folder, piece_like(is_legacy=True), {"tokenizer_config.json": settings})


def llama_class_legacy(folder: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, **NAMED}
    write(folder, piece_like(is_legacy=True), {"tokenizer_config.json": settings})


def gemma_class(folder: Path) -> None:
    settings = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    write(folder, piece_like(is_legacy=False), {"tokenizer_config.json": settings})


def qwen_class(folder: Path) -> None:
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    files = {"config.json": {"model_type": "qwen3"}, "tokenizer_config.json": settings}
    write(folder, byte_level(), files)


def qwen_model_alone(folder: Path) -> None:
    files = {"config.json": {"model_type": "qwen3", "eos_token_id": 266}}
    write(folder, byte_level(MARKS[:5]), files)


def qwen2_model(folder: Path) -> None:
    files = {"config.json": {"model_type": "qwen2"}, "tokenizer_config.json": {**CLASS, **NAMED}}
    write(folder, byte_level(), files)


def gpt2_class(folder: Path) -> None:
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write(folder, byte_level(), {"tokenizer_config.json": {**settings, "add_prefix_space": False}})


def gpt2_class_with_spaces(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    files = {"tokenizer_config.json": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}}
    write(folder, tokenizer, {"config.json": {"model_type": "qwen3"}, **files})


def gpt_neox_class(folder: Path) -> None:
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    write(folder, byte_level(), {"tokenizer_config.json": {**settings, "add_bos_token": True}})


def bloom_class(folder: Path) -> None:
    write(folder, byte_level(words=True), {"tokenizer_config.json": {"tokenizer_class": "BloomTokenizerFast", **NAMED}})


def class_of_model_config(folder: Path) -> None:
    files = {"config.json": {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}}
    write(folder, byte_level(), {**files, "tokenizer_config.json": {"eos_token": "<|im_end|>"}})


def added_tokens_json(folder: Path) -> None:
    tokenizer = byte_level(MARKS[:6])
    files = {
        "tokenizer_config.json": {**CLASS, **NAMED, "eos_token": "<|eot_id|>"},
        "added_tokens.json": {"<|eot_id|>": 268, "<think>": 270, "ab ": 269},
    }
    write(folder, tokenizer, files)


def added_tokens_decoder(folder: Path) -> None:
    def flags(text: str, **more: bool) -> dict[str, Any]:
        return {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True, **more}  # fmt: skip

    decoder = {"265": flags("<|im_start|>", lstrip=True), "266": flags("<|im_end|>", rstrip=True),
               "290": flags("<|extra|>", special=False, normalized=True), "291": flags("</s>")}  # fmt: skip
    settings = {
        **CLASS, **NAMED, "added_tokens_decoder": decoder, "additional_special_tokens": ["<|one|>", "<|two|>"],
        "bos_token": {"__type": "AddedToken", **flags("<s>")},
    }  # fmt: skip
    settings["bos_token"].pop("special")
    write(folder, byte_level(), {"tokenizer_config.json": settings, "special_tokens_map.json": {"bos_token": "<unk>"}})


def own_names(folder: Path) -> None:
    settings = {**CLASS, **NAMED, "image_token": "<|image|>", "extra_special_tokens": {"boi_token": "<|boi|>"}}
    write(folder, byte_level(), {"tokenizer_config.json": settings})


def special_tokens_are_split(folder: Path) -> None:
    write(folder, byte_level(), {"tokenizer_config.json": {**CLASS, **NAMED, "split_special_tokens": True}})


LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (
        plain, no_config, special_tokens_map_only, truncated_and_padded, sentence_pieces, llama_class,
        llama_class_legacy, gemma_class, qwen_class, qwen_model_alone, qwen2_model, gpt2_class, gpt2_class_with_spaces,
        gpt_neox_class, bloom_class, class_of_model_config, added_tokens_json, added_tokens_decoder, own_names,
        special_tokens_are_split,
    )
}  # fmt: skip
