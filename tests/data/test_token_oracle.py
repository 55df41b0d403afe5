"""Our token ids are transformers', or what cannot be written equally is refused by name (A1)."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.data.opened import open_prompts, run_on, write_rows
from tests.data.opened import prompts as drawn
from tests.data.token_layouts import LAYOUTS, plain, qwen_class

from myxa.actors.data.conversation import parse_messages
from myxa.actors.models.chat_template import PRINTED_PARTS, ChatTemplate, TemplateParts
from myxa.actors.models.tokenizer import FolderTokenizer, TokenizerParts, load_tokenizer
from myxa.actors.models.tokenizer_files import read_hf_tokenizer
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.actors.workflows.named import shown_turns
from myxa.core.config import RunConfig
from myxa.core.config.loading import Finding
from myxa.core.errors import DataError, ModelError, TemplateError
from myxa.core.messages import SamplingParams
from myxa.core.samples import Prompt, Sample
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.files import data, read_tokenizer
from myxa.launch.supervisor.placement import place

FOLDER = Path(__file__).parents[1] / "workflows" / "chat_templates"
DAY = dt.date(2026, 1, 5)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES: dict[str, str] = {
    **{path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))},
    "chatml": CHATML,
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "deepseek": (
        "{% set ns = namespace(is_first=true, system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}"
        "{%- set ns.system = m['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<|User|>' ~ m['content'] }}"
        "{%- elif m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|Assistant|>' ~ content ~ eos_token }}{%- elif m.role == 'tool' %}{{ '<|out|>' ~ m['content'] }}"
        "{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
    ),
    "json": (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson(indent=2) }}"
        "{{ dict(a=1) }}{{ '%s-%05d' % ('a', 3) }}{{ '{:>4}'.format('x') }}{{ 2 ** 3 * 4 + 1 }}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    ),
    "macros": (
        "{% macro turn(m, n=1) %}{{ m.role }}({{ n }}): {{ m.content or '' }}{{ caller() if caller else '' }}{% endmacro %}"
        "{% for m in messages if m.role != 'system' recursive %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{% call turn(m, loop.index) %}{{ loop.revindex }}{{ loop.cycle('x', 'y') }}{% endcall %}"
        "{% if not loop.last %}{{ '\\n' * 2 }}{% continue %}{% endif %}{{ eos_token }}{% endfor %}"
        "{% for key, value in (messages[0] | dictsort) %}{{ key }}={{ value }};{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}{{ range(3) | list }}{{ 'ab' | center(6) }}"
    ),
    "special_tokens": (
        "{{ bos_token }}{{ image_token is defined and image_token or '' }}{{ boi_token }}{% for m in messages %}"
        "{{ m.name }} <|im_start|> {{ m.content }} </s> {{ m.tool_call_id }}{{ m.thoughts }}{{ pad_token }}{% endfor %}"
        "{{ unk_token }}{{ sep_token }}{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    ),
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object"}}},
    {"name": "calc", "parameters": {"expr": {"enum": ["a", None, 1.5]}}},
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": [1, None]}}}
TEXT_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASK = {"role": "user", "content": "1+2?"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "3"}
Rows = list[dict[str, Any]]
CONVERSATIONS: dict[str, Rows] = {
    "question": [ASK],
    "system": [{"role": "system", "content": "be brief\n"}, ASK],
    "turns": [ASK, {"role": "assistant", "content": " ab\n\n"}, {"role": "user", "content": "  a ab: \n why "}],
    "calls": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, RESULT, RESULT],
    "null": [ASK, {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]}, RESULT, ASK],
    "empty keys": [{"content": "x", "role": "user", "tool_calls": [], "name": "", "weight": 0}, {**ASK, "name": "ann"}],
    "extra": [
        {**ASK, "thoughts": {"deep": [1, "é"]}, "date": "2026-01-01"},
        {"role": "assistant", "content": "b"},
        ASK,
    ],
    "odd": [{"role": "user", "content": "\U0001f600 e\u0301 \u200b \x00 <s></s><|im_end|><|new|> ab\r\nab \ufeff"}],
    "blank": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]}],
    "thinking": [ASK, {"role": "assistant", "content": "3", "reasoning_content": "one and two"}, ASK],
    "thinking named": [ASK, {"role": "assistant", "thinking": "one", "content": "3"}],
    "thoughts in text": [ASK, {"role": "assistant", "content": "<think>\nab\n</think>\n\nb"}, ASK],
    "answer": [ASK, {"role": "assistant", "content": "<think>\n\n</think>\n\nb"}],
    "begun": [ASK, {"role": "assistant", "content": "<think>\n"}],
    "observation": [ASK, {"role": "assistant", "content": "a"}, {"role": "observation", "content": "b"}],
}
OTHER_CLASSES = (
    "CodeLlamaTokenizerFast", "CohereTokenizer", "T5TokenizerFast", "RobertaTokenizer", "DebertaV2TokenizerFast",
    "XLMRobertaTokenizer", "MistralCommonBackend", "BertTokenizer", "AlbertTokenizer", "Qwen3_5Tokenizer", "OwnTokenizer",
)  # fmt: skip
UNREAD = "transformers cannot read the tokenizer of"
ARGUMENTS: list[dict[str, Any]] = [{}, {"enable_thinking": False}]


class FixedClock(dt.datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> "FixedClock":
        return cls(DAY.year, DAY.month, DAY.day, tzinfo=tz)


@pytest.fixture(scope="module", autouse=True)
def judges_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for torch's compiler, which transformers imports, and one day: midnight changes no prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setattr("transformers.utils.chat_template_utils.datetime", FixedClock)
        yield


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, FolderTokenizer, Path]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    LAYOUTS[request.param](folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), folder


def cases() -> Iterator[tuple[str, Rows, Rows, dict[str, bool]]]:
    for name, rows in CONVERSATIONS.items():
        for tools in ([], TOOLS):
            yield name, rows, tools, {"add_generation_prompt": True}
        yield name, rows, [], {"add_generation_prompt": False}
        if rows[-1]["role"] == "assistant":
            yield name, rows, [], {"add_generation_prompt": False, "continue_final_message": True}


def judged(judge: Any, rows: Rows, tools: Rows, how: dict[str, bool], more: dict[str, Any]) -> list[int] | None:
    """None: it refuses."""
    more = {"tools": tools or None, **how, **more}
    try:
        found = judge.apply_chat_template(rows, tokenize=True, return_dict=False, **more)
        text = judge.apply_chat_template(rows, tokenize=False, **more)
    except Exception:
        return None
    return None if PRINTED_PARTS in text else found


def templates_of(layout: str) -> list[str]:
    """All for the plain layout; for the others a few, in turn, so that all of them come up."""
    names, number = list(TEMPLATES), list(LAYOUTS).index(layout)
    return names if layout == "plain" else [*dict.fromkeys(names[(2 * number + i) % len(names)] for i in range(2))]


@pytest.mark.parametrize(
    ("pair", "name"), [(layout, n) for layout in LAYOUTS for n in templates_of(layout)], indirect=["pair"]
)
def test_a1_ids_equal_those_of_transformers(pair: tuple[Any, FolderTokenizer, Path], name: str) -> None:
    judge, ours, folder = pair
    judge.chat_template = source = TEMPLATES[name]
    special = read_hf_tokenizer(folder).special_tokens_map
    num_equal = 0
    for arguments in ARGUMENTS if "enable_thinking" in source else ARGUMENTS[:1]:
        template = ChatTemplate(TemplateParts(source, f"{name}.jinja", {**special, **arguments}, DAY))
        mine = FolderTokenizer(ours.tokenizer, template, ours.eos_token_ids, ours.beyond)
        handed = FolderTokenizer.of(msgspec.msgpack.decode(msgspec.msgpack.encode(mine.parts()), type=TokenizerParts))
        assert handed.parts() == mine.parts()
        for which, rows, tools, how in cases():
            wanted = judged(judge, rows, tools, how, arguments)
            opens, goes_on = how["add_generation_prompt"], how.get("continue_final_message", False)
            messages, error = parse_messages(rows, "prompt"), ""
            try:
                found = mine.render(messages, add_generation_prompt=opens, tools=tools, goes_on=goes_on)
                assert handed.render(messages, add_generation_prompt=opens, tools=tools, goes_on=goes_on) == found
                assert handed.decode(found) == mine.decode(found)
            except DataError as caught:
                found, error = None, str(caught)
            if found is None:
                is_unseen = which.startswith("thinking") and "reasoning" not in source
                assert f"{name}.jinja" in error
                assert wanted is None or is_unseen, (which, how, error)
            elif wanted is not None:
                assert found == wanted, (which, how, tools)
                num_equal += 1
            else:
                assert which == "parts", (which, how, mine.decode(found, skip_special=False))
    assert num_equal >= 8


def same(folder: Path, tools: Rows) -> None:
    """The folder's own template, found in whatever place it has."""
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(folder)
    ours, rows = load_tokenizer(folder), CONVERSATIONS["system"]
    wanted = judge.apply_chat_template(rows, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert ours.render(parse_messages(rows, "prompt"), add_generation_prompt=True, tools=tools) == wanted


def configure(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a1_templates_are_found_where_transformers_finds_them(tmp_path: Path, tools: Rows) -> None:
    plain(tmp_path)
    configure(tmp_path, chat_template=CHATML)
    same(tmp_path, tools)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TEMPLATES["json"]}]
    configure(tmp_path, chat_template=[*named, {"name": "rag", "template": "rag"}])
    same(tmp_path, tools)
    configure(tmp_path, chat_template={"default": TEMPLATES["json"], "tool_use": CHATML})
    same(tmp_path, tools)
    (tmp_path / "chat_template.jinja").write_bytes(b"own {{ messages[0].role }}\r\n{{ bos_token }}\r\n")
    same(tmp_path, tools)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | tojson }}")
    same(tmp_path, tools)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has chat templates named tool_use, and none named default is a text"):
        load_tokenizer(tmp_path)


def test_a1_a_template_for_processors_is_not_the_tokenizers(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    with pytest.raises(ModelError, match=r"chat_template\.json is for processors of images, not for tokenizers"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        *(({"added_tokens_decoder": wrong}, UNREAD) for wrong in ({"x": {"content": "a"}}, {"3": {"content": 7}}, [])),
        *(({"tokenizer_class": name}, f"tokenizer_class is {name.removesuffix('Fast')}") for name in OTHER_CLASSES),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}}, "auto_map names code of the folder's own"),
        ({"auto_map": ["own.Own", "own.OwnFast"]}, "auto_map names code of the folder's own"),
        ({"bos_token": 3}, UNREAD),
        ({"extra_special_tokens": 3}, UNREAD),
        ({"chat_template": [{"name": "default"}]}, UNREAD),
    ],
)  # fmt: skip
def test_a1_what_transformers_or_we_cannot_read_is_refused(
    tmp_path: Path, settings: dict[str, Any], cause: str
) -> None:
    plain(tmp_path)
    configure(tmp_path, chat_template=CHATML)
    load_tokenizer(tmp_path)
    configure(tmp_path, **settings)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert cause in str(caught.value)


def test_f7_a_template_that_writes_the_date_needs_one_in_the_run_file() -> None:
    ask = parse_messages([ASK], "prompt")
    clock = "{{ strftime_now('%d %b %Y') }}"
    with pytest.raises(TemplateError, match=r'writes today\'s date \(strftime_now\) -- set data.date = "YYYY-MM-DD"'):
        ChatTemplate(TemplateParts(clock, "here")).render(ask, add_generation_prompt=True)
    day = dt.date(2024, 2, 29)
    assert ChatTemplate(TemplateParts(clock, "here", day=day)).render(ask, add_generation_prompt=True) == "29 Feb 2024"
    guarded = ChatTemplate(TemplateParts(TEMPLATES["clock_guarded"], "here", {"day": "1 May"}))
    assert guarded.render(ask, add_generation_prompt=True).startswith("Today 1 May\n")


def test_a1_arguments_that_a_template_does_not_look_at_are_told_by_those_that_it_does(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["hybrid"])
    for arguments, wrong in (({"enable_thinking": False, "other": 1}, ""), ({"enable_thinkng": False}, "enable_thinkng"),
                             ({"thinking": True}, "thinking")):  # fmt: skip
        settings = RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t", "chat_template_kwargs": arguments}}
        )
        if not wrong:
            load_tokenizer(tmp_path, settings.data)
            continue
        with pytest.raises(ModelError, match=f'does not look at "{wrong}" .* did you mean "enable_thinking"'):
            load_tokenizer(tmp_path, settings.data)


def test_a_template_with_a_byte_order_mark_is_refused(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("\ufeff" + CHATML)
    with pytest.raises(ModelError, match="begins with a byte order mark, which every prompt would begin with"):
        load_tokenizer(tmp_path)


def test_f7_thinking_that_is_empty_is_none(tmp_path: Path) -> None:
    rows: Rows = [ASK, {"role": "assistant", "content": "3", "reasoning_content": ""}, ASK]
    template = ChatTemplate(TemplateParts(CHATML, "x.jinja"))
    assert "assistant\n3<|im_end|>" in template.render(parse_messages(rows, "prompt"), add_generation_prompt=True)


def test_g_text_parts_are_joined_where_a_template_takes_text(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    tokenizer = load_tokenizer(tmp_path)
    parts, text = (parse_messages(CONVERSATIONS[which], "prompt") for which in ("parts", "question"))
    assert tokenizer.render(parts, add_generation_prompt=True) == tokenizer.render(text, add_generation_prompt=True)


# -- demonstrations: what is learnt -------------------------------------------------------------------------------------
#
# Prompt and learnt ids are what the template writes of the whole conversation, or the row is refused (A3, G).

PlainPair = tuple[Any, FolderTokenizer, dict[str, str]]


def found_early(raw: dict[str, Any]) -> list[Finding]:
    """What is found before the start in tokenizer, template and first rows."""
    config = RunConfig.model_validate(raw)
    run = CheckedRun(config, place(config, 1))
    return [*read_tokenizer(run).findings, *data(run)]


FIVES = {"role": "user", "content": "4*5?"}
DEMONSTRATIONS: dict[str, Rows] = {
    "answer": [FIVES, {"role": "assistant", "content": "20"}],
    "system": [{"role": "system", "content": "be brief"}, FIVES, {"role": "assistant", "content": " a\n\nb "}],
    "turns": [FIVES, {"role": "assistant", "content": "21"}, {"role": "user", "content": "check"}, {"role": "assistant", "content": "20"}],
    "reasoning": [FIVES, {"role": "assistant", "reasoning_content": "four fives are twenty", "content": "20"}],
    "thinking": [FIVES, {"role": "assistant", "content": "<think>\nfour fives\n</think>\n\n20"}],
    "thinking turns": [
        FIVES, {"role": "assistant", "content": "<think>\nab\n</think>\n\n21"}, {"role": "user", "content": "check"},
        {"role": "assistant", "content": "<think>\nfour fives\n</think>\n\n20"},
    ],
    "call": [FIVES, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "calls": [FIVES, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "content": "3"}],
    "merging": [FIVES, {"role": "assistant", "content": "\n\n:\nab"}],
    "mark": [FIVES, {"role": "assistant", "content": "say <|im_end|> or </s> now"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> PlainPair:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("plain")
    plain(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), read_hf_tokenizer(folder).special_tokens_map


def prompts(folder: Path, rows: list[Rows], tools: Rows | None = None, **data: Any) -> list[Prompt]:
    path = write_rows(folder / "t.jsonl", *({"messages": row, "tools": tools} for row in rows))
    return drawn(open_prompts(run_on(path, data={"preset": "chat", "shuffle": False, **data}, algo={"kind": "sft"})))


def learn(tokenizer: FolderTokenizer, prompt: Prompt) -> Sample:
    nobody = ModelAccess(generate=None, sampling=SamplingParams(), context_length=1 << 16)  # pyright: ignore[reportArgumentType]
    return Episode(prompt=prompt, index=0, tokenizer=tokenizer, model=nobody).demonstration(shown_turns(prompt))


def with_template(ours: FolderTokenizer, source: str, special: dict[str, str], **arguments: Any) -> FolderTokenizer:
    template = ChatTemplate(TemplateParts(source, "x.jinja", {**special, **arguments}, DAY))
    return FolderTokenizer(ours.tokenizer, template, ours.eos_token_ids)


def runs(sample: Sample, tokenizer: FolderTokenizer) -> list[str]:
    """Texts of the runs of tokens that the loss sees."""
    found, ids = [], list[int]()
    for token, is_learnt in zip([*sample.response_ids.tolist(), 0], [*sample.loss_mask.tolist(), 0], strict=True):
        if is_learnt:
            ids.append(token)
        elif ids:
            found.append(tokenizer.decode(ids, skip_special=False))
            ids = []
    return found


@pytest.mark.parametrize("thinks", [None, False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a3_prompt_and_learnt_ids_are_the_templates_or_the_row_is_refused(
    plain_pair: PlainPair, tmp_path: Path, name: str, thinks: bool | None
) -> None:
    judge, ours, special = plain_pair
    source = TEMPLATES[name]
    if thinks is not None and "enable_thinking" not in source:
        return
    arguments = {} if thinks is None else {"enable_thinking": thinks}
    tokenizer = with_template(ours, source, special, **arguments)
    for tools in ([], TOOLS):
        more = {"tools": tools or None, "chat_template": source, "return_dict": False, **arguments}
        whole: dict[str, list[int]] = {}
        for chosen in ("all", "last"):
            found = prompts(tmp_path, [*DEMONSTRATIONS.values()], tools, learn=chosen)
            for (which, rows), prompt in zip(DEMONSTRATIONS.items(), found, strict=True):
                try:
                    sample, told = learn(tokenizer, prompt), ""
                except (DataError, TemplateError) as error:
                    sample, told = None, str(error)
                if sample is None:
                    assert "x.jinja" in told and " -- " in told, (which, told)
                    continue
                if which not in whole:
                    whole[which] = judge.apply_chat_template(rows, **more)
                ids, wanted = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()], whole[which]
                if ids != wanted[: len(ids)]:  # the template ends turns with nothing
                    assert ids[-1] == ours.eos_token_ids[0]
                    ids.pop()
                assert ids == wanted[: len(ids)], (which, tools, chosen)
                assert not judge.decode(wanted[len(ids) :]).strip(), (which, tools, chosen)
                assert sample.loss_mask[0] == 1
                num_learnt = len(rows) // 2 if which in ("turns", "thinking turns", "calls") and chosen == "all" else 1
                assert len(runs(sample, tokenizer)) == num_learnt, (which, tools, chosen)


def test_a3_two_thinking_blocks_are_not_learnt(plain_pair: PlainPair, tmp_path: Path) -> None:
    _, ours, special = plain_pair
    both = DEMONSTRATIONS["reasoning"], DEMONSTRATIONS["thinking"]
    for prompt in prompts(tmp_path, list(both)):
        with pytest.raises(
            DataError, match="x.jinja begins the model's turn with .*, which is not how it writes"
        ) as caught:
            learn(with_template(ours, TEMPLATES["hybrid"], special, enable_thinking=False), prompt)
        assert "may switch thinking on" in str(caught.value)
        (text,) = runs(learn(on := with_template(ours, TEMPLATES["hybrid"], special), prompt), on)
        assert text.startswith("<think>\nfour fives") and text.count("<think>") == 1 and text.endswith("20<|im_end|>")
        (text,) = runs(learn(on := with_template(ours, TEMPLATES["think_open"], special), prompt), on)
        assert text.startswith("four fives") and "<think>" not in text and text.endswith("</think>\n\n20<|im_end|>")


def test_a3_a_template_that_takes_thinking_out_is_refused(plain_pair: PlainPair, tmp_path: Path) -> None:
    _, ours, special = plain_pair
    source = TEMPLATES["deepseek"]
    for rows, how in (("answer", "begins the model's turn with"), ("thinking", "begins the model's turn with")):
        (prompt,) = prompts(tmp_path, [DEMONSTRATIONS[rows]])
        with pytest.raises(DataError, match=how):
            learn(with_template(ours, source, special), prompt)
    (prompt,) = prompts(tmp_path, [DEMONSTRATIONS["thinking"]])
    with pytest.raises(DataError, match="does not write .* in the model's turn"):
        learn(with_template(ours, source.replace("<think>\\n' }}{% endif", "' }}{% endif"), special), prompt)


def test_a3_a_base_model_learns_the_mark_of_its_template(tmp_path: Path) -> None:
    qwen_class(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(tmp_path)
    (prompt,) = prompts(tmp_path, [DEMONSTRATIONS["answer"]])
    assert runs(learn(tokenizer, prompt), tokenizer) == ["20<|im_end|>"]
    plain_mark = with_template(tokenizer, CHATML.replace("<|im_end|>", "###"), {})
    assert runs(learn(plain_mark, prompt), plain_mark) == ["20###"]


def test_g_all_turns_are_learnt_or_those_that_the_row_or_the_run_file_says(
    plain_pair: PlainPair, tmp_path: Path
) -> None:
    _, ours, _ = plain_pair
    turns = DEMONSTRATIONS["turns"]

    def switched(first: dict[str, Any], second: dict[str, Any], **data: Any) -> list[str]:
        rows = [turns[0], {**turns[1], **first}, turns[2], {**turns[3], **second}]
        (prompt,) = prompts(tmp_path, [rows], **data)
        return runs(learn(ours, prompt), ours)

    assert switched({}, {}) == ["21<|im_end|>", "20<|im_end|>"]
    assert switched({}, {}, learn="last") == ["20<|im_end|>"]
    for key in ("train", "weight", "loss_mask", "step_loss_mask", "loss"):
        assert switched({key: 0}, {key: 1}) == ["20<|im_end|>"]
        assert switched({key: True}, {key: False}) == ["21<|im_end|>"]
    with pytest.raises(DataError, match='no message of "messages" is learnt'):
        switched({"weight": 0}, {"weight": 0.0})
    with pytest.raises(DataError, match='message 2 of "messages" is neither learnt nor not: weight = 0.5'):
        switched({"weight": 0.5}, {})
    with pytest.raises(DataError, match='message 4 of "messages" is switched on and off: train, weight'):
        switched({}, {"weight": 0, "train": True})


def test_g_generation_blocks_say_what_is_learnt(plain_pair: PlainPair, tmp_path: Path) -> None:
    judge, ours, special = plain_pair
    source = (
        TEMPLATES["generation_tag"]
        .replace("+ '<|im_end|>' }}{% endg", "}}{% endg")
        .replace("{{- '\\n' }}{%- else", "{{- '<|im_end|>\\n' }}{%- else")
    )
    for text in (TEMPLATES["generation_tag"], source):
        rows = DEMONSTRATIONS["turns"]
        (prompt,) = prompts(tmp_path, [rows])
        sample = learn(with_template(ours, text, special), prompt)
        wanted = judge.apply_chat_template(
            rows, chat_template=text, return_assistant_tokens_mask=True, return_dict=True
        )
        mask = [0] * len(sample.prompt_ids) + sample.loss_mask.tolist()
        assert mask == wanted["assistant_masks"][: len(mask)]
        assert not any(wanted["assistant_masks"][len(mask) :])


@pytest.mark.parametrize(("kind", "template"), [("sft", "hybrid"), ("grpo", "alternate")])
def test_a3_first_rows_that_the_template_refuses_are_told_before_the_start(
    tmp_path: Path, kind: str, template: str
) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
    path = tmp_path / "t.jsonl"
    good, bad = DEMONSTRATIONS["answer"], DEMONSTRATIONS["thinking" if kind == "sft" else "system"]
    path.write_text("".join(json.dumps({"messages": rows, "label": "20"}) + "\n" for rows in (good, bad)))
    raw = {
        "model": {"path": str(tmp_path)}, "algo": {"kind": kind},
        "data": {"train": str(path), "preset": "chat", "chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    (finding,) = (one for one in found_early(raw) if one.severity == "error")
    assert (
        finding.key == "data.train"
        and f"{path}:2: " in str(finding.error)
        and str(tmp_path / "chat_template.jinja") in str(finding.error)
    )
    path.write_text(json.dumps({"messages": good, "label": "20"}) + "\n")
    assert all(one.severity == "warning" for one in found_early(raw))


def test_a3_a_template_whose_mark_ends_no_answer_is_told_before_the_start(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": DEMONSTRATIONS["answer"]}) + "\n")
    raw = {"model": {"path": str(tmp_path)}, "algo": {"kind": "sft"}, "data": {"train": str(path), "preset": "chat"}}
    (finding,) = found_early(raw)
    assert finding.severity == "warning" and "ends turns with '<|im_end|>'" in str(finding.error)
    mark = load_tokenizer(tmp_path).encode("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*mark]}))
    assert found_early(raw) == []


HEAD = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LEFT_OUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "system": (CHATML.replace("in messages", "in messages if m.role != 'system'"), {"prompt": CONVERSATIONS["system"]},
               "does not write the message of role 'system'"),
    "result": (CHATML.replace("in messages", "in messages if m.role != 'tool'"), {"prompt": CONVERSATIONS["calls"]},
               "does not write the message of role 'tool'"),
    "tools": (CHATML, {"prompt": "?", "tools": TOOLS}, "does not write the tools"),
    "calls": (CHATML, {"prompt": CONVERSATIONS["calls"]}, "does not write the calls of tools"),
    "head": (CHATML.replace(HEAD, ""), {"prompt": "?"}, "has to write the head of its turn by itself, '<|im_start|>assistant\\n'"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_the_template_leaves_out_of_a_prompt_is_told_before_the_start(tmp_path: Path, name: str) -> None:
    template, row, told = LEFT_OUT[name]
    qwen_class(tmp_path)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**row, "label": "x"}) + "\n")
    raw = {"model": {"path": str(tmp_path)}, "data": {"train": str(path)}}
    (tmp_path / "chat_template.jinja").write_text(template)
    (finding,) = found_early(raw)
    assert finding.severity == "warning" and told in str(finding.error), finding.error
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["qwen3"] if name != "head" else CHATML)
    assert found_early(raw) == []


def test_a_plain_prompt_without_the_mark_that_the_tokenizer_begins_texts_with_is_told(tmp_path: Path) -> None:
    LAYOUTS["llama_class"](tmp_path)
    path = tmp_path / "t.jsonl"
    raw = {"model": {"path": str(tmp_path)}, "data": {"train": str(path), "apply_chat_template": False}}
    for prompt in ("a", "<s>a"):
        path.write_text(json.dumps({"prompt": prompt, "label": "x"}) + "\n")
        texts = [str(finding.error) for finding in found_early(raw)]
        assert ["does not begin with '<s>'" in text for text in texts] == [True] * (prompt == "a")


def test_an_end_mark_that_a_demonstration_has_itself_is_learnt_once(tmp_path: Path) -> None:
    qwen_class(tmp_path)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": " a<|im_end|>"}) + "\n")
    data = {"train": str(path), "apply_chat_template": False, "answer_key": "completion"}
    config = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "algo": {"kind": "sft"}, "data": data})
    tokenizer = load_tokenizer(tmp_path, config.data)
    assert runs(learn(tokenizer, open_prompts(config).prompt(0)), tokenizer) == [" a<|im_end|>"]
