"""Tokenizers with the chat templates that well-known models have, and what an engine would draw."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.data.token_layouts import byte_level
from tests.harness.group_runner import delta

from myxa.actors.models.chat_template import ChatTemplate, PlainText, TemplateParts
from myxa.actors.models.tokenizer import FolderTokenizer
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import FinishReason, Message, Prompt

TEMPLATES = Path(__file__).parent / "chat_templates"


_made: dict[tuple[object, ...], FolderTokenizer] = {}


@dataclass(frozen=True)
class ChatModel:
    """What is known of a model's format."""

    name: str
    marks: tuple[str, ...]
    """Special tokens."""
    ends: tuple[str, ...]
    """Those that end a generation, the first one after an answer."""
    replies: tuple[str, ...]
    """Roles that may speak after a turn of text; Mistral's format has tools speak after tool calls only."""
    ends_for: Mapping[str, str]
    """What the model draws before that role speaks, where that is not the first of `ends`."""
    lead: str = ""
    """What the model draws before its words."""
    special: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tokens that the template asks for by name."""

    def tokenizer(self, **arguments: Any) -> FolderTokenizer:
        key = (self.name, *sorted(arguments.items()))
        if key not in _made:
            source = (TEMPLATES / f"{self.name}.jinja").read_text()
            template = ChatTemplate(TemplateParts(source, f"{self.name}.jinja", {**self.special, **arguments}))
            _made[key] = tokenizer_of(template, self.marks, self.ends)
        return _made[key]

    def write(self, folder: Path) -> Path:
        """The tokenizer as a model folder has it."""
        folder.mkdir(exist_ok=True)
        self.tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.ends[0], **self.special}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "generation_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{self.name}.jinja").read_text())
        return folder

    def end_before(self, role: str) -> str:
        return self.ends_for.get(role, self.ends[0])


def tokenizer_of(template: ChatTemplate | PlainText, marks: Sequence[str], ends: Sequence[str]) -> FolderTokenizer:
    bpe = byte_level(tuple(marks))
    id_of = bpe.get_vocab()
    return FolderTokenizer(bpe, template, tuple(id_of[end] for end in ends))


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN2_5 = ChatModel("qwen2_5", CHATML, ("<|im_end|>", "<|endoftext|>"), ("user", "tool"), {})
QWEN3 = ChatModel("qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), ("user", "tool"), {})
GLM4 = ChatModel(
    "glm4",
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    ("<|endoftext|>", "<|user|>", "<|observation|>"), ("user", "observation"),
    {"user": "<|user|>", "observation": "<|observation|>"}, lead="\n",
)  # fmt: skip
LLAMA3 = ChatModel(
    "llama3",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), ("user", "tool", "ipython"), {},
    special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
)  # fmt: skip
MISTRAL = ChatModel(
    "mistral",
    ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
     "[/TOOL_RESULTS]"),
    ("</s>",), ("user",), {}, lead=" ", special={"bos_token": "<s>", "eos_token": "</s>"},
)  # fmt: skip
CHAT_MODELS = (QWEN2_5, QWEN3, GLM4, LLAMA3, MISTRAL)


class Drawn:
    """An engine that draws given texts, marks written out in them."""

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self.next: tuple[str, FinishReason] = ("", "stop")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        text, finish = self.next
        yield delta(self._tokenizer.encode(text), finish, 1)


@dataclass
class Talk:
    """An episode whose model says what the test wants."""

    episode: Episode
    engine: Drawn

    async def says(self, text: str, finish: FinishReason = "stop") -> None:
        self.engine.next = (text, finish)
        await self.episode.generate()


def talk(tokenizer: FolderTokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Talk:
    engine = Drawn(tokenizer)
    model = ModelAccess(generate=engine.generate, sampling=SamplingParams(max_new_tokens=4000), context_length=1 << 16)
    prompt = Prompt(group_id=0, row=0, pass_index=0, messages=tuple(messages), tools=tuple(tools))
    return Talk(Episode(prompt=prompt, index=0, tokenizer=tokenizer, model=model), engine)
