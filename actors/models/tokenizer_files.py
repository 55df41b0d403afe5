"""transformers' own tokenizer of a model folder, and what is looked at before it is read.

Its class is chosen here by the rules of `AutoTokenizer`, which imports torch. No code of the folder's own is run.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ...core.errors import ModelError, raised_as
from ...core.files import read_regular
from .hf_folder import (
    CONFIG,
    MAX_TOKENIZER_BYTES,
    TEMPLATE_FOLDER,
    TOKENIZER,
    TOKENIZER_FILES,
    find_tokenizer,
    read_json,
)

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
AS_FILE = "TokenizersBackend"
"""The class that takes `tokenizer.json` as it is."""
CLASS_OF_TYPE: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "glm4": AS_FILE,
}
"""The class that transformers has for a model whose tokenizer names none."""
TRUSTED_OVER_FILES = ("qwen2",)
"""Models for which transformers takes its own class, whatever the tokenizer says."""
GENERIC_CLASSES = ("", AS_FILE, "PythonBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast")
CLASSES = (AS_FILE, "Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "LlamaTokenizer", "GemmaTokenizer")


class LibraryError(Exception):
    """A tokenizers library cannot do it; for whatever is wrong in a file it raises any Exception, or a panic."""


@contextmanager
def library_errors() -> Generator[None, None, None]:
    """What the library raises becomes LibraryError; TypeError and OverflowError, for arguments, stay what they are."""
    try:
        yield
    except (TypeError, OverflowError):
        raise
    except Exception as err:
        raise LibraryError(str(err) or type(err).__name__) from err
    except BaseException as err:
        if type(err).__name__ != "PanicException":  # of pyo3_runtime, which cannot be imported
            raise
        raise LibraryError(str(err)) from err


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is not there."""
    return read_json(path, remedy="mend the file") if path.exists() else {}


def read_hf_tokenizer(folder: str | Path) -> Any:
    """A `transformers.TokenizersBackend`. Raises ModelError naming the file that is broken."""
    root = find_tokenizer(folder).parent
    for path in (*(root / name for name in TOKENIZER_FILES), *(root / TEMPLATE_FOLDER).glob("*.jinja")):
        if path.exists():
            _bytes_of(path)
    for name in (SPECIAL_TOKENS_MAP, ADDED_TOKENS):
        read_object(root / name)
    name = _class_name(root, read_object(root / TOKENIZER_CONFIG))
    import transformers  # half a second, which processes that read no tokenizer do not pay

    what = f"transformers cannot read the tokenizer of {root} as {name}"
    remedy = f"mend {TOKENIZER_CONFIG} and the files beside it, or save the tokenizer again (save_pretrained)"
    with raised_as(ModelError, what, TypeError, OverflowError, LibraryError, remedy=remedy), library_errors():
        tokenizer: Any = getattr(transformers, name).from_pretrained(str(root), local_files_only=True)
    tokenizer.backend_tokenizer.no_truncation()  # both may be stored; neither belongs to a prompt
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return tokenizer


def _class_name(root: Path, settings: Mapping[str, Any]) -> str:
    own_code = settings.get("auto_map")
    if isinstance(own_code, dict):
        own_code = cast("dict[str, Any]", own_code).get("AutoTokenizer")
    if own_code:
        raise ModelError(
            f"{root / TOKENIZER_CONFIG}: auto_map names code of the folder's own, which is not run",
            remedy=f"save the tokenizer with transformers as one {TOKENIZER} that does the same, and take auto_map out",
        )
    config = read_object(root / CONFIG)
    model_type = str(config.get("model_type"))
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    own_class = str(declared).removesuffix("Fast")
    registered = CLASS_OF_TYPE.get(model_type, "")
    is_byte_level = own_class == "LlamaTokenizer" and b'"ByteLevel"' in _bytes_of(root / TOKENIZER)
    if is_byte_level and model_type not in TRUSTED_OVER_FILES:
        return AS_FILE
    if own_class and registered and registered != own_class:
        own_class = AS_FILE if registered == AS_FILE else registered if model_type in TRUSTED_OVER_FILES else own_class
    name = own_class or ("" if declared else registered)
    name = AS_FILE if name in (*GENERIC_CLASSES, "BloomTokenizer") else name
    if name not in CLASSES:
        raise ModelError(
            f"{root}: tokenizer_class is {name}; what transformers makes of {TOKENIZER} for it is not done here",
            remedy=f'set tokenizer_class = "PreTrainedTokenizerFast" in {TOKENIZER_CONFIG}: the file is taken as it is',
        )
    return name


def _bytes_of(path: Path) -> bytes:
    with raised_as(ModelError, f"cannot read {path}", OSError, remedy="download the file again"):
        return read_regular(path, MAX_TOKENIZER_BYTES)
