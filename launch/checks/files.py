"""Checks of the files that a run file names: model, tokenizer, chat template, checkpoint, data, functions.

The actor that needs a file checks it again, and the buffer reads all rows. Here only the first rows of each data file
are read, once, and a large file is not indexed. `fit` needs no more than the model's config.json. Imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...actors.backends.megatron.families import check_adapted
from ...actors.backends.megatron.layout import ParallelLayout, check_routing
from ...actors.checkpoints.folder import check_model, read_manifest, weights_version
from ...actors.data.data_files import check_data_files, is_large, needs_pyarrow, open_rows
from ...actors.data.layout import RowLayout
from ...actors.data.prompts import encode_prompt, held_out_layout, layout_of, open_data, source_rows
from ...actors.data.row_file import Row, RowError
from ...actors.engines.sglang.server_args import check_guesses, check_sizes, guesses_by, stale_guesses
from ...actors.hub import lacks_weights
from ...actors.ledger.file import LEDGER, is_in_use, recorded
from ...actors.models.adapters import adapted_matrices, adapter_facts, check_facts, read_adapter
from ...actors.models.fp8 import SCALE_SUFFIXES
from ...actors.models.hf_folder import (
    CONFIG,
    check_critic,
    check_experts_apart,
    check_second_model,
    check_values,
    open_weights,
    read_config,
)
from ...actors.models.model_config import ModelConfig
from ...actors.models.tokenizer import FolderTokenizer, load_tokenizer
from ...actors.rewards.call import ALONE, RewardKeys
from ...actors.rewards.rewarder import check_args
from ...actors.user_code.functions import (
    ADVANTAGE_FN,
    CLASS_WORKFLOW,
    GROUP_FILTER,
    LOSS_FN,
    REWARD_POST_PROCESS,
    SAMPLE_FILTER,
    WEIGHT_FN,
    WORKFLOW,
    Expected,
    check_call,
    file_of,
    import_raised,
    no_attribute,
    reward_expected,
)
from ...actors.workflows.demonstrated import demonstrate
from ...actors.workflows.named import shown_turns
from ...actors.workflows.turn_renderer import TurnRenderer, can_append
from ...algos.filters import GROUP_FILTERS, SAMPLE_FILTERS, group_filter, sample_filter
from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.config.loading import Finding
from ...core.config.servers import OFF
from ...core.errors import (
    ConfigError,
    DataError,
    LedgerError,
    ModelError,
    MyxaError,
    TemplateError,
    TrainError,
    raised_as,
)
from ...core.samples import DEMONSTRATION_TURNS, PAIR, Message, Prompt
from ...core.weight_channel import SENT_CHANNELS
from ..composition.rollout_parts import eval_rewards
from ..composition.weight_channels import choose_channel, held_fp8
from ..run_lineage.resume_point import named_checkpoint
from .check import CheckedRun, key_of, looked, warnings
from .node import has_module

MAX_READ_BYTES = 2 << 30
"""Of weights, within about two seconds; the embedded engine reads all of them when it loads them."""


def model_folder(run: CheckedRun) -> Iterator[Finding]:
    """Config, tokenizer and chat template, weights; further models beside it."""
    config = run.config
    if not run.of("trainer", "rollout"):
        return
    try:
        model = read_config(config.model.path, has_mtp=config.megatron.mtp > 0)
    except MyxaError as error:
        yield Finding("megatron.mtp" if isinstance(error, ConfigError) else "model.path", error)
        return
    if run.of("rollout"):
        yield from run.once(read_tokenizer).findings
    yield from _weights(config.model.path, model)
    if run.of("trainer"):
        if config.algo.ref_path:
            yield from looked("algo.ref_path", _check_reference, config, replace(model, has_mtp=False))
        if config.critic.path:
            yield from looked("critic.path", check_critic, config.critic, model)


LAYER = re.compile(r"model\.layers\.\d+\.")
SHOWN = 3
REPEATED = ("lm_head.weight", ".inv_freq", *SCALE_SUFFIXES, ".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of names of weights that a folder may hold though no parameter is made of them alone: tied heads, speeds of
rotation, scales of FP8, the embedding and head once more in an MTP layer."""


def _weights(path: str, model: ModelConfig) -> Iterator[Finding]:
    """Also those that a run leaves alone, by layer."""
    if lacks_weights(path):
        return
    try:
        names = _check_weights(path, model)
    except MyxaError as error:
        yield Finding("model.path", error)
        return
    unused = Counter(f"{layer[0]}*" if (layer := LAYER.match(name)) else name for name in names)
    if not unused:
        return
    shown = ", ".join(itertools.islice(unused, SHOWN)) + (", ..." if len(unused) > SHOWN else "")
    text = f"{path}: {unused.total()} weights are neither trained nor exported: {shown}"
    if f"model.layers.{model.num_layers}.*" in unused:
        text += "; layers behind the last one predict several tokens at once (MTP), and do not follow the policy"
    remedy = "nothing, unless engines make drafts with them (sglang.speculative_algorithm): then see megatron.mtp"
    yield Finding("model.path", ModelError(text, remedy=remedy), "warning")


def _check_weights(path: str, model: ModelConfig) -> list[str]:
    """Names of weights that the model has no place for."""
    shapes = model.tensor_shapes()
    with open_weights(path, model, as_stored=True) as tensors:
        check_values(shapes, tensors, path, max_bytes=MAX_READ_BYTES)
        return [name for name in tensors if name not in shapes and not name.endswith(REPEATED)]


def _check_reference(config: RunConfig, model: ModelConfig) -> None:
    check_second_model("algo.ref_path", config.algo.ref_path, model)
    with raised_as(ConfigError, "algo.ref_path", MyxaError):
        _check_weights(config.algo.ref_path, model)


# -- tokenizer and chat template ---------------------------------------------------------------------------------------

ASKED = "Myxa7c1e04b9Question"
"""What no template writes by itself."""


class ReadTokenizer(NamedTuple):
    """The model's tokenizer with the run's chat template; None: it, or the template, cannot be used."""

    tokenizer: FolderTokenizer | None
    findings: tuple[Finding, ...]


def read_tokenizer(run: CheckedRun) -> ReadTokenizer:
    config = run.config
    try:
        tokenizer = load_tokenizer(config.model.path, config.data)
    except MyxaError as error:
        return ReadTokenizer(None, (Finding(key_of(error.message) or "model.path", error),))
    findings = tuple(template_findings(config, tokenizer)) or (*_opening_findings(tokenizer), *_end_findings(tokenizer))
    is_usable = all(finding.severity == "warning" for finding in findings)
    return ReadTokenizer(tokenizer if is_usable else None, findings)


def template_findings(config: RunConfig, tokenizer: FolderTokenizer) -> Iterator[Finding]:
    """A template that refuses a question or leaves it out, or cannot append to a turn where the run has several."""
    render = partial(tokenizer.render_text, add_generation_prompt=True)
    trouble = ""
    try:
        text = render((Message(role="user", content=ASKED),))
        if ASKED not in text:
            trouble = f"leaves out what the user says: of a question it writes {text[:80]!r}"
    except TemplateError as error:  # the template asks for a date
        yield Finding("data.date", error)
        return
    except DataError as error:
        trouble = f"refuses a question: {error.message}"
    place = f"the chat template of {tokenizer.template_place}"
    if trouble:
        yield Finding("model.path", TemplateError(f"{place} {trouble}", remedy="mend the template"))
    elif config.rollout.max_turns > 1 and not can_append(render):
        turns = f"rollout.max_turns = {config.rollout.max_turns}"
        text = f"{turns}: {place} cannot append a message of any role that is known after a turn of the model"
        error = TemplateError(text, remedy="mend the template, or set rollout.max_turns = 1")
        yield Finding("rollout.max_turns", error)


def _opening_findings(tokenizer: FolderTokenizer) -> Iterator[Finding]:
    """A template that does not open the model's turn, though it writes a head before it."""
    question = Message(role="user", content=ASKED)
    try:
        opened, closed, answered = (
            tokenizer.render_text((question, *more), add_generation_prompt=opens)
            for opens, more in ((True, ()), (False, ()), (False, (Message(role="assistant", content=ASKED),)))
        )
    except DataError:  # it needs more than a question
        return
    head = answered.removeprefix(opened).partition(ASKED)[0]
    if opened == closed and answered.startswith(opened) and head.strip():
        text = (
            f"the chat template of {tokenizer.template_place} takes no notice of add_generation_prompt: the model has "
            f"to write the head of its turn by itself, {head!r}"
        )
        remedy = "add {% if add_generation_prompt %}...{% endif %} with that head to the end of the template"
        yield Finding("model.path", TemplateError(text, remedy=remedy), "warning")


def _end_findings(tokenizer: FolderTokenizer) -> Iterator[Finding]:
    """A template for chats on a base model, whose answers would not stop at the end of the turn."""
    try:
        mark = TurnRenderer(tokenizer).end_mark()
    except MyxaError:  # the rows show it, if there are any of that kind
        return
    if mark is None or mark in tokenizer.eos_token_ids:
        return
    shown = tokenizer.decode([mark], skip_special=False)
    text = f"the chat template of {tokenizer.template_place} ends turns with {shown!r} (token {mark}), which is no end "
    error = ModelError(
        f"{text}token of the model: no answer ends there", remedy="add it to eos_token_id of generation_config.json"
    )
    yield Finding("model.path", error, "warning")


# -- data --------------------------------------------------------------------------------------------------------------

FIRST_ROWS = 50
RENDERED_ROWS = 8
"""The first ones, as the model is asked them; demonstrations as they are trained on."""
_SLIP = re.compile(rb"(?<!\\)(?:\\\\)*(\\(?:b[A-Za-z]|frac)\w*)")
"""In JSON: backspaces and form feeds that were backslashes."""
MAX_BYTES = 64 << 20
"""A JSONL file up to this size is indexed, which counts its rows; of a larger one only the size is looked at."""

Write = Callable[[Prompt], DataError | None]
"""Returns what the model does not see of a prompt. Raises MyxaError for a row that cannot be written."""


class ReadRows(NamedTuple):
    """Chosen rows of all files of one key (None: too large to be counted, or not to be read), and what is wrong."""

    num_rows: int | None
    findings: tuple[Finding, ...]


def train_rows(run: CheckedRun) -> dict[str, ReadRows]:
    """By source of prompts; a single one is called ""."""
    config = run.config
    rows: dict[str, ReadRows] = {}
    for name, part in config.data.parts().items():
        layout, skips_bad = layout_of(config, part, config.reward, name), part.on_bad_line == "skip"
        key, write = config.data.key_of(name), run.once(writer)
        rows[name] = read_rows(key, part.train, layout, skips_bad=skips_bad, write=write)
    return rows


def held_out_rows(run: CheckedRun) -> dict[str, ReadRows]:
    """By evaluation set; a single one is called ""."""
    config, skips_bad = run.config, run.config.data.on_bad_line == "skip"
    return {
        name: read_rows(key, files, held_out_layout(config, name), skips_bad=skips_bad)
        for name, (key, files) in config.eval.files().items()
    }


def data(run: CheckedRun) -> Iterator[Finding]:
    for rows in (*run.once(train_rows).values(), *run.once(held_out_rows).values()) if run.of("buffer") else ():
        yield from rows.findings


def writer(run: CheckedRun) -> Write | None:
    """Renders a row as the rollout actors do; None: there are none, or the tokenizer has faults of its own."""
    tokenizer = run.once(read_tokenizer).tokenizer if run.of("rollout") else None
    if tokenizer is None:
        return None
    renderer, is_learnt = TurnRenderer(tokenizer), run.config.algo.is_given
    begins = None if run.config.data.apply_chat_template else tokenizer.first_mark()

    def write(prompt: Prompt) -> DataError | None:
        ids = renderer.prompt(prompt)
        if is_learnt:
            for key in PAIR if run.config.algo.learns_pairs else (DEMONSTRATION_TURNS,):
                demonstrate(tokenizer, renderer, prompt.messages, shown_turns(prompt, key), prompt.tools)
        if begins is not None and ids[0] != begins:
            mark = tokenizer.decode([begins], skip_special=False)
            return DataError(
                f"the prompt, which is encoded as it is, does not begin with {mark!r}, as the model's tokenizer begins "
                "texts",
                remedy=f"put {mark} before the prompts, if the model was trained with it",
            )
        if left_out := renderer.left_out(prompt):
            return DataError(
                f"the chat template of {tokenizer.template_place} does not write {left_out}",
                remedy="mend the template, or leave it out of the rows if the model is not to see it",
            )
        return None

    return write


def read_rows(
    key: str, value: str | tuple[str, ...], layout: RowLayout, *, skips_bad: bool, write: Write | None = None
) -> ReadRows:
    """Look at the files that a key names."""
    total: int | None = 0
    findings: list[Finding] = []
    for source in parse_sources(value):
        num_rows = None
        if source.environment:  # made when the run starts
            total = None
            continue
        try:
            check_data_files(source.path, key)
            is_readable = not needs_pyarrow(source.path) or has_module("pyarrow")  # else a finding of the packages
            if is_readable and not is_large(source.path, key, MAX_BYTES):
                file = open_rows(source.path, layout, key)
                num_rows = len(source.rows(file.num_rows))
                rows = itertools.islice(source_rows(source, file), FIRST_ROWS)
                findings += _first_bad(rows, layout, key, skips_bad=skips_bad, write=write)
        except MyxaError as error:
            findings.append(Finding(key_of(error.message) or key, error))
        except (OSError, ImportError) as error:
            findings.append(Finding(key, DataError(str(error))))
        total = None if total is None or num_rows is None else total + num_rows
    return ReadRows(total, tuple(findings))


def _first_bad(
    rows: Iterator[Row], layout: RowLayout, key: str, *, skips_bad: bool, write: Write | None
) -> Iterator[Finding]:
    unseen = slip = None
    for number, (place, read) in enumerate(rows):
        try:
            prompt = layout.prompt(read())
            encoded = encode_prompt(prompt)
            if slip is None and (slip := _SLIP.search(encoded)):
                text = f"{place}: a control character is where {slip[1].decode()} was meant"
                yield Finding(key, DataError(text, remedy="write the backslash twice in JSON"), "warning")
            if write is not None and number < RENDERED_ROWS and (error := write(prompt)) and unseen is None:
                unseen = DataError(f"{place}: {error.message}", remedy=error.remedy)
                yield Finding(key, unseen, "warning")
        except (RowError, MyxaError) as bad:
            kind, cause = (DataError, bad.cause) if isinstance(bad, RowError) else (type(bad), bad.message)
            error = kind(f"{place}: {cause}", remedy=bad.remedy)
            yield Finding(key, error, "warning" if skips_bad and isinstance(error, DataError) else "error")
            return


# -- whether the parts fit ---------------------------------------------------------------------------------------------


COMPUTE = {
    ("trainer", "torch"): "the torch trainer",
    ("rollout", "embedded"): "the embedded engine",
    ("trainer", "megatron"): "the Megatron trainer",
}
"""Role and kind of what computes a model by our own code."""


def fit(run: CheckedRun) -> Iterator[Finding]:
    """Whether trainer and engine can run a model of this kind, cut like this."""
    config, model = run.config, run.model
    if model is None:
        return
    kinds = {(actor.role, actor.kind) for actor in run.actors}
    if run.of("rollout") and config.generates:
        yield from looked("engine.context_length", _check_context, config, model.context_length)
    if ("rollout", "sglang") in kinds and config.generates and not config.engine.attach:
        num_gpus, num_experts = len(run.of("rollout")[0].devices), None if model.foreign else model.num_experts
        for shape in config.engine.shapes(config.sglang):
            server_gpus = shape.num_gpus if config.engine.groups and num_gpus else num_gpus
            yield from looked(shape.key, check_sizes, shape, server_gpus, num_experts)
            yield from _guesses(config.of_server(shape), model, f"{shape.key}.speculative_algorithm")
    if ("rollout", "sglang") in kinds and config.generates:
        yield from looked("weights.channel", _check_served, config, model)
    if config.lora.rank and run.of("trainer"):
        yield from looked("lora", _check_adapters, config, model)
    yield from _own_code(config, model, kinds)
    if ("trainer", "megatron") in kinds:
        layout = ParallelLayout.of(config.megatron)
        yield from looked("megatron", layout.check_model, model, config.megatron.model)
        if config.megatron.routing_replay:
            yield from looked("megatron.routing_replay", check_routing, model.num_experts, config.megatron)


def _own_code(config: RunConfig, model: ModelConfig, kinds: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """Whether our own code computes the model, and samples so long."""
    model = replace(model, is_scorer=model.is_scorer and config.algo.kind != "reward")
    foreign = {("trainer", "torch")} if config.trainer.impl == "hf" else set[tuple[str, str]]()
    foreign |= set() if config.generates else {("rollout", "embedded")}
    for place in (place for place in COMPUTE if place in kinds and place not in foreign):
        require = model.require_own if "megatron" in place else model.require_plain
        yield from looked("model.path", require, COMPUTE[place])
        yield from looked("engine.context_length", model.require_window, COMPUTE[place], config.engine.context_length)


def _guesses(config: RunConfig, model: ModelConfig, key: str) -> Iterator[Finding]:
    """Of tokens that the server guesses ahead: by what, and whether that follows the policy."""
    channel = choose_channel(config)
    values = config.sglang | {"model_path": config.served_path}
    yield from looked(key, check_guesses, values, channel)
    has_layers = model.source.get("num_nextn_predict_layers") == 1
    if guesses_by(values) == "layers" and not (has_layers or values.get("speculative_draft_model_path")):
        text = f"{key}: {config.model.path} has not one layer that guesses (num_nextn_predict_layers)"
        remedy = "name a draft model in sglang.speculative_draft_model_path, or use NGRAM"
        yield Finding(key, ConfigError(text, remedy=remedy))
    elif why := stale_guesses(values, channel, trains_layers=config.megatron.mtp > 0):
        yield Finding(key, ConfigError(f"{key}: {why}", remedy="look at rollout/draft_accepted_length"), "warning")


def _check_served(config: RunConfig, model: ModelConfig) -> None:
    folder, channel = config.served_path, choose_channel(config)
    fp8, is_sent = held_fp8(config, model), channel in SENT_CHANNELS
    served = config.weights.served_folder
    if not config.engine.attach:
        check_second_model("weights.served_folder", served, model)
        if not model.foreign:
            check_experts_apart(folder)
    elif served and is_sent and not (Path(served) / CONFIG).exists():
        cause = f"weights.served_folder = {served}: holds no {CONFIG}"
        raise ConfigError(cause, remedy="name the servers' model folder")
    if fp8 and config.lora.rollout == "adapter":
        raise ConfigError(
            f'lora.rollout = "adapter": adapters on servers that hold FP8 ({folder}) were not tried yet',
            remedy='serve a folder in bfloat16, or set lora.rollout = "merged"',
        )
    if fp8:
        fp8.check_sent(folder)
    if fp8 and not is_sent:
        raise ConfigError(
            f'weights.channel = "{channel}" brings weights as they are trained; engines that hold FP8 ({folder}) get '
            "theirs only between devices",
            remedy='use "nccl", on one GPU "cuda_ipc"; or serve a folder in bfloat16',
        )
    if not fp8 and not config.engine.attach and config.lora.rollout != "adapter":
        for shape in config.engine.shapes(config.sglang):
            kind = shape.table.get("quantization")
            if kind not in (None, "unquant", *OFF) and shape.table.get("load_format") != "flash_rl":
                raise ConfigError(
                    f"{shape.key}.quantization = {kind}: SGLang quantises the folder once, when it loads it, and has "
                    "no place for weights that come later",
                    remedy="leave it out, and name a folder in FP8 blocks in model.path (`myxa convert MODEL FOLDER "
                    "--dtype fp8` writes one)",
                )


def _check_adapters(config: RunConfig, model: ModelConfig) -> None:
    if config.lora.rollout == "adapter" and (cause := _why_not_served(config, model)):
        raise ConfigError(f'lora.rollout = "adapter": {cause}', remedy='set it to "merged"')
    if model.foreign:  # transformers alone knows its matrices
        return
    matrices = adapted_matrices(config.lora, model.tensor_shapes())
    if config.roles.trainer.kind == "megatron":
        check_adapted(matrices, model)
    if config.lora.path:
        read_adapter(config.lora, matrices)


SERVED = frozenset(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "gate_up", "down"))
"""Matrices whose adapters SGLang 0.5.17 holds as the trainer computes them."""


def _why_not_served(config: RunConfig, model: ModelConfig) -> str:
    """What SGLang 0.5.17 cannot do with these adapters; empty: it can."""
    if model.foreign or model.kv_lora_rank:
        return f"adapters of models of type {model.model_type} are not held by servers yet"
    ends = {name.rpartition(".")[2] for name in adapted_matrices(config.lora, model.tensor_shapes())}
    if others := ends - SERVED:
        return f"SGLang holds no adapters of {', '.join(sorted(others))}"
    if model.num_experts and ends & {"gate_proj", "up_proj", "down_proj"}:
        return "adapters of experts are not held by servers yet"
    if ends & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= ends:
        return "SGLang puts those of q_proj, k_proj and v_proj together: both q_proj and v_proj need one"
    sizes = config.sglang
    if isinstance(number := sizes.get("dp_size", 1), int) and number > 1 and not sizes.get("enable_dp_attention"):
        return "SGLang loads none while it runs with sglang.dp_size above 1"
    return ""


def _check_context(config: RunConfig, model_context: int) -> None:
    length, max_new = config.engine.context_length, config.rollout.max_new_tokens
    if length > model_context:
        raise ConfigError(
            f"engine.context_length = {length}: {config.model.path} was made for at most {model_context} tokens",
            remedy="lower it, or set it to 0 for the model's own",
        )
    if max_new >= (length or model_context):
        raise ConfigError(
            f"rollout.max_new_tokens = {max_new}: leaves no room for a prompt in the context of "
            f"{length or model_context} tokens of {config.model.path}",
            remedy="lower it",
        )


# -- what a run resumes from -------------------------------------------------------------------------------------------


def resume(run: CheckedRun) -> Iterator[Finding]:
    """The checkpoint, and what a resumed run keeps: model, kind of trainer, critic, prompts."""
    config = run.config
    if not (config.trainer.resume and run.of("trainer", "buffer")):
        return
    try:
        checkpoint = named_checkpoint(config.trainer.resume)
    except TrainError as error:
        if run.of("trainer"):
            yield Finding("trainer.resume", ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy))
        return
    if run.of("trainer"):
        yield from _manifest_findings(run, checkpoint)
    if run.of("buffer"):
        yield from looked("data.train", _check_data_of, config, checkpoint)


def _manifest_findings(run: CheckedRun, checkpoint: Path) -> Iterator[Finding]:
    """Whether what the trainer saved is of this run's model, with its critic and its adapters."""
    config = run.config
    try:
        manifest = read_manifest(checkpoint)
    except TrainError:  # the ranks report a torn one
        return

    def check() -> None:
        if run.model is not None:
            check_model(checkpoint, manifest, run.model, config.roles.trainer.kind)
            check_facts(checkpoint, manifest.lora, adapter_facts(config.lora, config.model.path))

    end = config.optimizer.rate_is_zero_from(config.policy_updates)
    version = weights_version(checkpoint, manifest.extra)
    yield from warnings(
        (0 < end <= manifest.num_updates and not 0 < config.run.num_steps <= version, "optimizer.schedule",
         (f'= "{config.optimizer.schedule}" ends at update {end} with the learning rate 0, and the checkpoint that '
         f"trainer.resume names is at update {manifest.num_updates}: nothing more would be learned"),
         "set optimizer.decay_steps to an update to come, or optimizer.min_lr_ratio above 0"),
    )  # fmt: skip
    for finding in looked("model.path", check):
        yield Finding("model.path", ConfigError(finding.error.message, remedy=finding.error.remedy))
    if bool(manifest.critic) != config.critic.enabled:
        has, is_on = ("a", "false") if manifest.critic else ("no", "true")
        text = f"critic.enabled = {is_on}: the checkpoint that trainer.resume names has {has} critic"
        remedy = "set it as it was, or start from the exported model folder"
        yield Finding("critic.enabled", ConfigError(text, remedy=remedy))


def _check_data_of(config: RunConfig, checkpoint: Path) -> None:
    """A resumed run keeps the prompts that its ledger was written for. Reads all data, as the buffer does."""
    run_ledger = checkpoint.parent.parent / LEDGER
    ledger = checkpoint / LEDGER if is_in_use(run_ledger) or not run_ledger.is_file() else run_ledger
    try:
        fingerprint = recorded(ledger, "dataset")
    except LedgerError:  # the choice of the ledger reports it
        return
    try:
        data = open_data(config)
    except ConfigError:  # a finding of the files themselves
        return
    if data.fingerprint != fingerprint:
        raise ConfigError(
            f"data: the prompts are not those that the run of {checkpoint.name} began with ({run_ledger.parent}): "
            "other rows, other order, or another run.seed",
            remedy="take data.* and run.seed back; with other data, begin a run with model.path = that one's export",
        )


# -- functions ---------------------------------------------------------------------------------------------------------
#
# Of a file's function whether it is there and takes what it gets, by the source text: no user code runs. The actor that
# loads a function checks what only an import shows: modules, a signature that a decorator changes.


def functions(run: CheckedRun) -> Iterator[Finding]:
    for roles in (("rollout", "buffer"), ("trainer",)):
        if run.of(*roles):
            yield from function_findings(run.config, roles)


ALL = ("rollout", "buffer", "trainer")
MAX_SOURCE_BYTES = 8 << 20
MAKERS = frozenset({"globals", "vars", "setattr", "exec", "__getattr__"})
"""What a module can give itself names with."""


def function_findings(config: RunConfig, roles: Container[str] = ALL) -> Iterator[Finding]:
    """Named functions of actors of these roles that are not in their files, and wrong arguments."""
    algo = config.algo
    if "rollout" in roles:
        rewards = {RewardKeys.of_one(name) if name else ALONE: part for name, part in config.reward.parts().items()}
        rewards |= {RewardKeys.of_eval_set(name): part for name, part in eval_rewards(config).items()}
        for keys, part in rewards.items():
            yield from looked(keys.args, check_args, part, config, keys)
    if "buffer" in roles and algo.group_filter in GROUP_FILTERS:
        yield from looked("algo.group_filter_args", group_filter, algo.group_filter, algo.group_filter_args)
    if "buffer" in roles and algo.sample_filter in SAMPLE_FILTERS:
        yield from looked("algo.sample_filter_args", sample_filter, algo.sample_filter, algo.sample_filter_args)
    for role, expected, name, args in _named(config):
        if role in roles and ".py:" in name:
            yield from looked(expected.key, check_function, name, expected, args)


def _named(config: RunConfig) -> Iterator[tuple[str, Expected, str, Iterable[str]]]:
    """Role, what is expected of the function, its name, and the named arguments that it gets besides."""
    algo = config.algo
    for (key, name), part in zip(config.reward.named_functions(), config.reward.parts().values(), strict=True):
        args = (*part.args, *(("pattern",) if part.pattern else ()))
        yield "rollout", reward_expected(key, takes_group=part.scope == "group"), name, args
    for name, settings in sorted(config.eval.sets.items()):
        expected = reward_expected(f"eval.sets.{name}.reward", takes_group=False)
        yield "rollout", expected, settings.reward, settings.reward_args
    yield "rollout", WORKFLOW, config.rollout.workflow, config.rollout.workflow_args
    yield "buffer", GROUP_FILTER, algo.group_filter, algo.group_filter_args
    yield "buffer", SAMPLE_FILTER, algo.sample_filter, algo.sample_filter_args
    yield "trainer", REWARD_POST_PROCESS, algo.reward_post_process, ()
    yield "trainer", ADVANTAGE_FN, algo.advantage_fn, ()
    yield "trainer", WEIGHT_FN, algo.weight_fn, ()
    yield "trainer", LOSS_FN, algo.loss_fn, ()


def check_function(name: str, expected: Expected, args: Iterable[str]) -> None:
    """Raises ConfigError or UserCodeError for a file that is no Python, lacks the name or cannot be called so."""
    key = expected.key
    file, _, attr = name.rpartition(":")
    path = file_of(file, key)
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        cause, place = f"{type(error).__name__}: {error.msg}", f"{path}:{error.lineno}"
        raise import_raised(key, file, cause, place) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}", remedy="name a readable .py file") from error
    names = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] += 1
        elif isinstance(node, ast.alias):
            names[(node.asname or node.name).partition(".")[0]] += 1
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in MAKERS):
            names[node.id] += 1
    if names and attr.partition(".")[0] not in names and names.keys().isdisjoint({"*", *MAKERS}):
        raise no_attribute(key, file, attr, attr, names)
    definition = next((node for node in tree.body if getattr(node, "name", "") == attr), None)
    if definition is not None and names[attr] == 1 and not getattr(definition, "decorator_list", ()):
        _check_signature(name, definition, expected, args)


def _check_signature(name: str, node: ast.stmt, expected: Expected, args: Iterable[str]) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        check_call(name, _signature(node.args), expected, args, is_async=isinstance(node, ast.AsyncFunctionDef))
    elif isinstance(node, ast.ClassDef) and expected is WORKFLOW and not (node.bases or node.keywords):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        init = methods.get("__init__")
        signature = _signature(init.args, num_own=1) if init is not None else inspect.Signature()
        check_call(name, signature, CLASS_WORKFLOW, args, is_async=False)


def _signature(args: ast.arguments, *, num_own: int = 0) -> inspect.Signature:
    """Without annotations, and with None for each default. `num_own`: parameters that Python fills itself."""
    kinds = inspect.Parameter
    plain = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    num_needed = len(plain) - len(args.defaults)
    parameters = [
        kinds(arg.arg, kind, default=kinds.empty if place < num_needed else None)
        for place, (arg, kind) in enumerate(plain)
    ]
    parameters += [kinds(args.vararg.arg, kinds.VAR_POSITIONAL)] if args.vararg else []
    parameters += [
        kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    parameters += [kinds(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(parameters[num_own:])
