"""What a tokenizer was saved with beside `tokenizer.json`: special tokens, added tokens, chat templates, its class.

transformers is the judge: `AutoTokenizer.from_pretrained` reads the same files in the same order (5.x,
`tokenization_utils_base._from_pretrained` and `tokenization_utils_tokenizers.TokenizersBackend`), and a prompt must
have the ids that it gives. What it would do and this file does not, is a ModelError. Knows files, not messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ...core.errors import ModelError
from ...core.files import read_regular
from .hf_folder import CONFIG, MAX_TOKENIZER_BYTES, TEMPLATE_FOLDER, TOKENIZER, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
MAX_TEMPLATE_CHARS = 1_000_000
DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLASS_OF_TYPE: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "glm4": "TokenizersBackend",
}
"""The class that transformers has for a model whose tokenizer names none."""
TRUSTED_OVER_FILES = ("qwen2",)
"""Models for which transformers takes its own class, whatever the tokenizer says."""
GENERIC_CLASSES = ("", "TokenizersBackend", "PythonBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast")
AS_FILE = (*GENERIC_CLASSES, "BloomTokenizer")
"""Classes that take `tokenizer.json` as it is."""
BYTE_LEVEL = ("Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer")
DEFAULT_TOKENS: Mapping[str, Mapping[str, str]] = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {key: f"<{key.removesuffix('_token')}>" for key in SPECIAL_KEYS if key[:3] not in ("sep", "cls")},
}
"""Classes that rebuild a tokenizer from vocabulary and merges, with the special tokens that they assume."""

Token = tokenizers.AddedToken | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """All of it, merged."""

    root: Path
    named: Mapping[str, Token]
    """Special tokens by the names that a template calls them: `bos_token`, ..., and names of the model's own."""
    extra: Sequence[Token]
    """Special tokens without a name."""
    added: Sequence[tokenizers.AddedToken] | None
    """Tokens beside the vocabulary in the order of their ids. None: `tokenizer.json` alone names them."""
    legacy: Mapping[int, tokenizers.AddedToken]
    """Of `added_tokens.json`, where `tokenizer_config.json` has none."""
    templates: Mapping[str, tuple[str, str]]
    """Name -> place and source of a chat template."""
    class_name: str
    assumed: frozenset[str]
    """Special tokens that no file names, but the class assumes."""
    settings: Mapping[str, Any]

    @property
    def added_texts(self) -> set[str]:
        return {_text(token) for token in (*self.legacy.values(), *(self.added or ()), *self.extra)}

    @property
    def special_texts(self) -> dict[str, str]:
        return {key: str(_text(token)) for key, token in self.named.items()}

    def complete(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Make the tokenizer of `tokenizer.json` what transformers makes of it. Raises ModelError."""
        tokenizer.no_truncation()  # both may be stored; neither belongs to a prompt
        tokenizer.no_padding()
        of_file = tokenizer.get_added_tokens_decoder()
        if self.class_name in DEFAULT_TOKENS:
            self._rebuild(tokenizer, of_file)
        tokens = (
            [token for _, token in sorted({**self.legacy, **of_file}.items())] if self.added is None else self.added
        )
        known = {*map(_text, of_file.values()), *map(_text, tokens)}
        wanted: list[Token] = list(tokens)
        for token in (*self.named.values(), *self.extra):
            if _text(token) not in known and token not in wanted:
                wanted.append(token)
        names = set(map(_text, self.named.values()))
        _add(tokenizer, [_as_special(token, is_named=_text(token) in names) for token in wanted])
        if self.class_name == "Qwen2Tokenizer":
            texts = dict.fromkeys(map(_text, (*self.named.values(), *self.extra)))
            _add(tokenizer, [tokenizers.AddedToken(text, special=True) for text in texts])
        tokenizer.encode_special_tokens = bool(self.settings.get("split_special_tokens"))

    def _rebuild(self, tokenizer: tokenizers.Tokenizer, of_file: Mapping[int, tokenizers.AddedToken]) -> None:
        """As the class does, which looks at vocabulary, merges and post-processor only."""
        model: Any = tokenizer.model
        place, remedy = self.root / TOKENIZER, f'set tokenizer_class = "PreTrainedTokenizerFast" in {TOKENIZER_CONFIG}'
        if not isinstance(model, models.BPE):
            kind = type(model).__name__
            raise ModelError(f"{place}: {self.class_name} has a BPE model, this file a {kind}", remedy=remedy)
        added = of_file.values() if self.added is None else self.added
        kept = {_text(token) for token in (*added, *self.named.values(), *self.extra)}
        base = tokenizer.get_vocab(with_added_tokens=False)
        beside = [index for index, token in sorted(of_file.items()) if _text(token) not in base]
        lost = [_text(token) for token in of_file.values() if _text(token) not in kept and _text(token) not in base]
        if lost or beside != list(range(len(base), len(base) + len(beside))):
            what = f"leaves out the added token {lost[0]!r}" if lost else "gives the added tokens other ids"
            raise ModelError(f"{place}: transformers reads it as {self.class_name}, which {what}", remedy=remedy)
        model.dropout, model.ignore_merges, model.unk_token = None, False, None
        model.continuing_subword_prefix, model.end_of_word_suffix = None, None
        model.fuse_unk = model.byte_fallback = self.class_name not in BYTE_LEVEL
        prefix = self.settings.get("add_prefix_space")
        backend: Any = tokenizer
        if self.class_name in BYTE_LEVEL:
            is_qwen = self.class_name == "Qwen2Tokenizer"
            words = pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), behavior="isolated", invert=False)
            level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=not is_qwen)
            backend.normalizer = None if self.class_name == "GPT2Tokenizer" else normalizers.NFC()
            backend.decoder = decoders.ByteLevel()
            backend.pre_tokenizer = pre_tokenizers.Sequence([words, level]) if is_qwen else level
            return
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.class_name == "GemmaTokenizer":
            model.unk_token = str(_text(self.named["unk_token"])) if "unk_token" in self.named else None
            backend.normalizer = normalizers.Replace(" ", "▁")
            backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
        else:
            is_prefixed = True if prefix is None else bool(prefix)
            scheme = "never" if not is_prefixed else "always" if self.settings.get("legacy") else "first"
            backend.normalizer = None
            backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
            steps += [decoders.Strip(content=" ", left=1)] if is_prefixed else []
        backend.decoder = decoders.Sequence(steps)


def read_tokenizer_files(folder: str | Path) -> TokenizerFiles:
    """Raises ModelError naming the file that is broken, or that holds what is not done."""
    root = Path(folder)
    settings = _object(root / TOKENIZER_CONFIG)
    _refuse_unknown(root, settings)
    templates = _templates(root, settings.get("chat_template"))
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    own = _own_names(settings)
    legacy: dict[int, tokenizers.AddedToken] = {}
    added: list[tokenizers.AddedToken] | None = None
    if "added_tokens_decoder" in settings:
        table = _table(settings["added_tokens_decoder"], root / TOKENIZER_CONFIG, "added_tokens_decoder")
        by_id = {_index(key, root / TOKENIZER_CONFIG): value for key, value in table.items()}
        added = [_token(value, root / TOKENIZER_CONFIG) for _, value in sorted(by_id.items())]
    else:
        _merge_map(root / SPECIAL_TOKENS_MAP, settings)
        own |= _own_names(settings)
        legacy = _legacy(root / ADDED_TOKENS, settings)
    class_name = _class_name(root, settings)
    defaults = DEFAULT_TOKENS.get(class_name, {})
    assumed = frozenset(text for key, text in defaults.items() if key not in settings)
    settings = {**defaults, **settings}
    flags = {_text(token): token for token in (*legacy.values(), *(added or ()))}
    named: dict[str, Token] = {}
    for key, value in {**{key: settings.get(key) for key in SPECIAL_KEYS}, **own}.items():
        token = _special(value, root, key)
        if token is not None:
            named[key] = flags.get(_text(token), token) if key in SPECIAL_KEYS else token
    tokens = [_special(one, root, "extra_special_tokens") for one in _extra(settings, root)]
    return TokenizerFiles(
        root=root, named=named, extra=[one for one in tokens if one is not None], added=added, legacy=legacy,
        templates=templates, class_name=class_name, assumed=assumed, settings=settings,
    )  # fmt: skip


def _refuse_unknown(root: Path, settings: Mapping[str, Any]) -> None:
    files = settings.get("fast_tokenizer_files")
    if files not in (None, [], [TOKENIZER]):
        raise ModelError(
            f"{root / TOKENIZER_CONFIG}: fast_tokenizer_files names {files}, of which transformers takes one by its "
            "version",
            remedy=f"save the tokenizer again, as one {TOKENIZER}",
        )
    if settings.get("fix_mistral_regex"):
        raise ModelError(
            f"{root / TOKENIZER_CONFIG}: fix_mistral_regex changes how texts are cut, which is not done here",
            remedy="load the tokenizer with transformers and save it again, then leave the key out",
        )
    own_code = settings.get("auto_map")
    if isinstance(own_code, dict):
        own_code = cast("dict[str, Any]", own_code).get("AutoTokenizer")
    if own_code:
        raise ModelError(
            f"{root / TOKENIZER_CONFIG}: auto_map names code of the folder's own, which is not run",
            remedy=f"save the tokenizer with transformers as one {TOKENIZER} that does the same, and take auto_map out",
        )


def _templates(root: Path, configured: object) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    paths = {DEFAULT_NAME: root / TEMPLATE_FILE} if (root / TEMPLATE_FILE).exists() else {}
    folder = root / TEMPLATE_FOLDER
    if folder.is_dir():
        paths |= {path.name.removesuffix(".jinja"): path for path in sorted(folder.glob("*.jinja"))}
    for name, path in paths.items():
        found[name] = (str(path), _template_text(path))
    if found:
        return found
    place = str(root / TOKENIZER_CONFIG)
    if isinstance(configured, str) and configured:
        return {DEFAULT_NAME: (place, configured)}
    if isinstance(configured, list):
        rows = [cast("dict[str, Any]", one) for one in cast("list[object]", configured) if isinstance(one, dict)]
        configured = {one.get("name"): one.get("template") for one in rows}
    for name, source in cast("dict[object, object]", configured if isinstance(configured, dict) else {}).items():
        if not (isinstance(name, str) and isinstance(source, str)):
            raise ModelError(
                f"{place}: chat_template holds something else than names and templates",
                remedy='write [{"name": "default", "template": "..."}, ...]',
            )
        found[name] = (place, source)
    return found


def _template_text(path: Path) -> str:
    try:
        text = read_regular(path, 4 * MAX_TEMPLATE_CHARS).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ModelError(f"cannot read {path}: {err}", remedy="mend the file") from err
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _merge_map(path: Path, settings: dict[str, Any]) -> None:
    """Values of `special_tokens_map.json` come before those of `tokenizer_config.json`."""
    for key, value in _object(path).items():
        if key == "extra_special_tokens" and isinstance(value, list):
            before = _extra(settings, path.parent, key)
            new = [one for one in cast("list[object]", value) if _text(one) not in set(map(_text, before))]
            settings[key] = [*before, *new]
        else:
            is_token = isinstance(value, dict) and key != "extra_special_tokens"
            settings[key] = {**cast("dict[str, Any]", value), "special": True} if is_token else value


def _own_names(settings: dict[str, Any]) -> dict[str, object]:
    """Special tokens by names of the model's own, taken out of the settings."""
    own: dict[str, object] = {
        key: value
        for key, value in settings.items()
        if key.endswith("_token") and key not in SPECIAL_KEYS and isinstance(value, (str, dict))
    }
    if isinstance(settings.get("extra_special_tokens"), dict):
        own |= settings.pop("extra_special_tokens")
    return own


def _extra(settings: Mapping[str, Any], root: Path, *keys: str) -> list[object]:
    """Special tokens without a name, by the first of the keys that has any."""
    keys = keys or ("extra_special_tokens", "additional_special_tokens")
    found: object = next((settings[key] for key in keys if settings.get(key)), list[object]())
    if not isinstance(found, list):
        raise ModelError(f"{root}: {keys[0]} holds {type(found).__name__}, not a list", remedy="write a list of tokens")
    return cast("list[object]", found)


def _legacy(path: Path, settings: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    special = {_text(settings[key]) for key in SPECIAL_KEYS if settings.get(key)}
    special |= set(map(_text, _extra(settings, path.parent, "extra_special_tokens")))
    found: dict[int, tokenizers.AddedToken] = {}
    for text, index in _object(path).items():
        is_special = text in special
        token = tokenizers.AddedToken(text, lstrip=False, rstrip=False, normalized=not is_special, special=is_special)
        found[_index(index, path)] = token
    return found


def _class_name(root: Path, settings: Mapping[str, Any]) -> str:
    """The class that `AutoTokenizer` would take, or an empty string for one that takes `tokenizer.json` as it is."""
    config = _object(root / CONFIG)
    model_type = str(config.get("model_type"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    own = str(named).removesuffix("Fast")
    registered = CLASS_OF_TYPE.get(model_type, "")
    if own == "LlamaTokenizer" and model_type not in TRUSTED_OVER_FILES and _is_byte_level(root / TOKENIZER):
        return ""
    if own and registered and registered != own:
        own = "" if registered in GENERIC_CLASSES else registered if model_type in TRUSTED_OVER_FILES else own
    found = own or ("" if named else registered)
    if found not in AS_FILE and found not in DEFAULT_TOKENS:
        raise ModelError(
            f"{root}: tokenizer_class is {found}; what transformers makes of {TOKENIZER} for it is not done here",
            remedy=f'set tokenizer_class = "PreTrainedTokenizerFast" in {TOKENIZER_CONFIG}: the file is taken as it is',
        )
    return "" if found in AS_FILE else found


def _is_byte_level(path: Path) -> bool:
    try:
        return path.exists() and b'"ByteLevel"' in read_regular(path, MAX_TOKENIZER_BYTES)
    except OSError as err:
        raise ModelError(f"cannot read {path}: {err}", remedy="download the file again") from err


def _object(path: Path) -> dict[str, Any]:
    return read_json(path, remedy="mend the file") if path.exists() else {}


def _table(value: object, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {key} holds {type(value).__name__}, not an object", remedy="mend the file")
    return cast("dict[str, Any]", value)


def _index(value: object, path: Path) -> int:
    try:
        index = int(cast("str", value))
    except (TypeError, ValueError) as err:
        raise ModelError(f"{path}: {value!r} is no token id", remedy="mend the file") from err
    if not 0 <= index < 1 << 31:
        raise ModelError(f"{path}: token id {index} is out of range", remedy="mend the file")
    return index


def _special(value: object, root: Path, key: str) -> Token | None:
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, tokenizers.AddedToken):
        return value
    if isinstance(value, dict):
        return _token(cast("dict[str, Any]", value), root)
    raise ModelError(f"{root}: {key} holds {type(value).__name__}, not a token", remedy="write the token as a text")


def _token(value: object, place: Path) -> tokenizers.AddedToken:
    table = _table(value, place, "a token")
    content, flags = table.get("content"), {key: table[key] for key in TOKEN_FLAGS if key in table}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelError(f"{place}: {value!r} is no token", remedy='write {"content": "<token>", "special": true, ...}')
    return tokenizers.AddedToken(content, **flags)


def _text(token: object) -> str:
    """Special tokens are written as text, or as an object with `content`."""
    if isinstance(token, dict):
        return str(cast("dict[str, Any]", token).get("content"))
    return token.content if isinstance(token, tokenizers.AddedToken) else str(token)


def _as_special(token: Token, *, is_named: bool) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    if is_named and not token.special:
        token.special = True
    return token


def _add(tokenizer: tokenizers.Tokenizer, tokens: Iterable[tokenizers.AddedToken]) -> None:
    tokenizer.add_tokens(list(tokens))  # pyright: ignore[reportUnknownMemberType] -- the stub says a bare list
