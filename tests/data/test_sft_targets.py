"""SFT: prompt and learnt ids are what the template writes of the whole conversation, or the row is refused (A3, G).

transformers is the judge of what the template writes, and of what `{% generation %}` marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_token_oracle import CALL, CHATML, RESULT, TEMPLATES, TODAY, TOOLS
from tests.data.token_layouts import plain, qwen_class

from myxa.actors.data import open_prompts
from myxa.actors.models.chat_template import ChatTemplate
from myxa.actors.models.tokenizer import FolderTokenizer, load_tokenizer
from myxa.actors.models.tokenizer_files import read_tokenizer_files
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.actors.workflows.named import shown_turns
from myxa.core.config import RunConfig
from myxa.core.errors import DataError, TemplateError
from myxa.core.messages import SamplingParams
from myxa.core.samples import Prompt, Sample
from myxa.launch.checks.check import CheckedRun, Finding
from myxa.launch.checks.files import data, read_tokenizer
from myxa.launch.supervisor.placement import place

Rows = list[dict[str, Any]]


def told(raw: dict[str, Any]) -> list[Finding]:
    """What is found before the start in tokenizer, template and first rows."""
    config = RunConfig.model_validate(raw)
    run = CheckedRun(config, place(config, 1))
    return [*read_tokenizer(run).findings, *data(run)]


ASK = {"role": "user", "content": "4*5?"}
CONVERSATIONS: dict[str, Rows] = {
    "answer": [ASK, {"role": "assistant", "content": "20"}],
    "system": [{"role": "system", "content": "be brief"}, ASK, {"role": "assistant", "content": " a\n\nb "}],
    "turns": [ASK, {"role": "assistant", "content": "21"}, {"role": "user", "content": "check"}, {"role": "assistant", "content": "20"}],
    "reasoning": [ASK, {"role": "assistant", "reasoning_content": "four fives are twenty", "content": "20"}],
    "thinking": [ASK, {"role": "assistant", "content": "<think>\nfour fives\n</think>\n\n20"}],
    "thinking turns": [
        ASK, {"role": "assistant", "content": "<think>\nab\n</think>\n\n21"}, {"role": "user", "content": "check"},
        {"role": "assistant", "content": "<think>\nfour fives\n</think>\n\n20"},
    ],
    "call": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "calls": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "content": "3"}],
    "merging": [ASK, {"role": "assistant", "content": "\n\n:\nab"}],
    "mark": [ASK, {"role": "assistant", "content": "say <|im_end|> or </s> now"}],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiler_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where torch's compiler may put the folder that it makes when transformers imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, FolderTokenizer, dict[str, str]]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("plain")
    plain(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), read_tokenizer_files(folder).special_texts


def prompts(folder: Path, rows: list[Rows], tools: Rows | None = None, **data: Any) -> list[Prompt]:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"messages": row, "tools": tools}) + "\n" for row in rows))
    config = {"data": {"train": str(path), "preset": "chat", "shuffle": False, **data}, "algo": {"kind": "sft"}}
    found = open_prompts(RunConfig.model_validate({"model": {"path": "m"}, **config}))
    return [prompt for at in range(len(rows)) if (prompt := found.prompt(at)) is not None]


def learn(tokenizer: FolderTokenizer, prompt: Prompt) -> Sample:
    nobody = ModelAccess(generate=None, sampling=SamplingParams(), context_length=1 << 16)  # pyright: ignore[reportArgumentType]
    return Episode(prompt=prompt, index=0, tokenizer=tokenizer, model=nobody).demonstration(shown_turns(prompt))


def with_template(ours: FolderTokenizer, source: str, special: dict[str, str], **arguments: Any) -> FolderTokenizer:
    template = ChatTemplate(source, "x.jinja", special, arguments, day=TODAY)
    return FolderTokenizer(ours._tokenizer, template, ours.eos_token_ids)


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
    pair: tuple[Any, FolderTokenizer, dict[str, str]], tmp_path: Path, name: str, thinks: bool | None
) -> None:
    judge, ours, special = pair
    source = TEMPLATES[name]
    if thinks is not None and "enable_thinking" not in source:
        return
    arguments = {} if thinks is None else {"enable_thinking": thinks}
    tokenizer = with_template(ours, source, special, **arguments)
    for tools in ([], TOOLS):
        more = {"tools": tools or None, "chat_template": source, "return_dict": False, **arguments}
        whole: dict[str, list[int]] = {}
        for chosen in ("all", "last"):
            found = prompts(tmp_path, [*CONVERSATIONS.values()], tools, learn=chosen)
            for (which, rows), prompt in zip(CONVERSATIONS.items(), found, strict=True):
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


def test_a3_two_thinking_blocks_are_not_learnt(
    pair: tuple[Any, FolderTokenizer, dict[str, str]], tmp_path: Path
) -> None:
    _, ours, special = pair
    both = CONVERSATIONS["reasoning"], CONVERSATIONS["thinking"]
    for prompt in prompts(tmp_path, list(both)):
        with pytest.raises(
            DataError, match="x.jinja begins the model's turn with .* and writes another thinking in the"
        ) as caught:
            learn(with_template(ours, TEMPLATES["hybrid"], special, enable_thinking=False), prompt)
        assert "switch thinking on" in str(caught.value)
        (text,) = runs(learn(on := with_template(ours, TEMPLATES["hybrid"], special), prompt), on)
        assert text.startswith("<think>\nfour fives") and text.count("<think>") == 1 and text.endswith("20<|im_end|>")
        (text,) = runs(learn(on := with_template(ours, TEMPLATES["think_open"], special), prompt), on)
        assert text.startswith("four fives") and "<think>" not in text and text.endswith("</think>\n\n20<|im_end|>")


def test_a3_a_template_that_takes_thinking_out_is_refused(
    pair: tuple[Any, FolderTokenizer, dict[str, str]], tmp_path: Path
) -> None:
    _, ours, special = pair
    source = TEMPLATES["deepseek"]
    for rows, how in (("answer", "leaves that out of the demonstration"), ("thinking", "leaves that out")):
        (prompt,) = prompts(tmp_path, [CONVERSATIONS[rows]])
        with pytest.raises(DataError, match=how):
            learn(with_template(ours, source, special), prompt)
    (prompt,) = prompts(tmp_path, [CONVERSATIONS["thinking"]])
    with pytest.raises(DataError, match="leaves its thinking out"):
        learn(with_template(ours, source.replace("<think>\\n' }}{% endif", "' }}{% endif"), special), prompt)


def test_a3_a_base_model_learns_the_mark_of_its_template(tmp_path: Path) -> None:
    qwen_class(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(tmp_path)
    (prompt,) = prompts(tmp_path, [CONVERSATIONS["answer"]])
    assert runs(learn(tokenizer, prompt), tokenizer) == ["20<|im_end|>"]
    plain_mark = with_template(tokenizer, CHATML.replace("<|im_end|>", "###"), {})
    assert runs(learn(plain_mark, prompt), plain_mark) == ["20###"]


def test_g_all_turns_are_learnt_or_those_that_the_row_or_the_run_file_says(
    pair: tuple[Any, FolderTokenizer, dict[str, str]], tmp_path: Path
) -> None:
    _, ours, _ = pair
    turns = CONVERSATIONS["turns"]

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


def test_g_generation_blocks_say_what_is_learnt(
    pair: tuple[Any, FolderTokenizer, dict[str, str]], tmp_path: Path
) -> None:
    judge, ours, special = pair
    source = (
        TEMPLATES["generation_tag"]
        .replace("+ '<|im_end|>' }}{% endg", "}}{% endg")
        .replace("{{- '\\n' }}{%- else", "{{- '<|im_end|>\\n' }}{%- else")
    )
    for text in (TEMPLATES["generation_tag"], source):
        rows = CONVERSATIONS["turns"]
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
    good, bad = CONVERSATIONS["answer"], CONVERSATIONS["thinking" if kind == "sft" else "system"]
    path.write_text("".join(json.dumps({"messages": rows, "label": "20"}) + "\n" for rows in (good, bad)))
    raw = {
        "model": {"path": str(tmp_path)}, "algo": {"kind": kind},
        "data": {"train": str(path), "preset": "chat", "chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    (finding,) = (one for one in told(raw) if one.severity == "error")
    assert (
        finding.key == "data.train"
        and f"{path}:2: " in str(finding.error)
        and str(tmp_path / "chat_template.jinja") in str(finding.error)
    )
    path.write_text(json.dumps({"messages": good, "label": "20"}) + "\n")
    assert all(one.severity == "warning" for one in told(raw))


def test_a3_a_template_whose_mark_ends_no_answer_is_told_before_the_start(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS["answer"]}) + "\n")
    raw = {"model": {"path": str(tmp_path)}, "algo": {"kind": "sft"}, "data": {"train": str(path), "preset": "chat"}}
    (finding,) = told(raw)
    assert finding.severity == "warning" and "ends turns with '<|im_end|>'" in str(finding.error)
    mark = load_tokenizer(tmp_path).encode("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*mark]}))
    assert told(raw) == []
