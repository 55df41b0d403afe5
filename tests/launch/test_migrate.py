"""`myxa migrate`: the values of real argument lists arrive under our keys, nothing is dropped, the file loads, and
hostile files are refused or said."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from myxa.core.config import load_config
from myxa.core.config.peers import Peer, rows
from myxa.core.errors import ConfigError
from myxa.launch.cli import main
from myxa.launch.migration.run_file import Migration, migrate

SLIME = """\
BASE=/data
NUM=${NUM:-8}
if true; then WHO=me; fi
CKPT_ARGS=(--hf-checkpoint ${BASE}/m --save x --save-interval 20) # kept
ROLL=(
   --prompt-data "$BASE/a b.jsonl" --input-key prompt --apply-chat-template
   # --lr 9
   --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 128
   --rollout-max-response-len 8192 --rm-type math --eps-clip 0.2 --eps-clip-high 0.28
   --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --optimizer adam --lr 1e-6
   --lr-decay-style constant --adam-beta2 0.98 --max-tokens-per-gpu 9216 --context-parallel-size 2
   --eval-prompt-data aime /e.jsonl --n-samples-per-eval-prompt 16 --sglang-cuda-graph-bs 1 2 4
   --custom-generate-function-path mine.generate --sglang-port 3 --no-such-thing 7 --rollout-temperature ${WHO}
   --wandb-key s3cr3t
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node ${NUM} --colocate \\
   --rollout-num-gpus-per-engine 2 ${CKPT_ARGS[@]} "${ROLL[@]}" 2>&1 | tee log
"""
VERL = """\
files="['/d/a.parquet', '/d/b.parquet']"
python3 -m verl.trainer.main_ppo --config-name=x.yaml algorithm.adv_estimator=grpo data.train_files="$files" \\
  data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 data.max_response_length=1024 \\
  actor_rollout_ref.model.path=/m actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=5 \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=vllm trainer.total_epochs=15 \\
  +trainer.odd=1 ~trainer.gone +odd.key=2 trainer.logger='["console","wandb"]' trainer.project_name=p $@
"""


def made(peer: Peer, text: str, folder: Path, name: str = "run.sh") -> tuple[Migration, dict[str, Any]]:
    """It must load, and each argument must be in a value's comment or a list."""
    file = folder / name
    file.write_text(text)
    one = migrate(peer, file)
    load_config(folder / "run.toml", text=one.text())
    for argument in one.arguments.by_name:
        assert re.search(rf"(?:--|[ ;*#]){re.escape(argument)}(?![\w.-])", one.text()), argument
    return one, tomllib.loads(one.text())


def test_a_script_of_slime(tmp_path: Path) -> None:
    one, table = made("slime", SLIME, tmp_path)
    assert table["model"] == {"path": "/data/m"}
    assert table["data"]["train"] == "/data/a b.jsonl"
    assert table["data"]["shuffle"] is False, "slime's default"
    assert table["run"]["num_steps"] == 3000
    algo = {key: table["algo"][key] for key in ("batch_size", "minibatches", "clip_low", "clip_high", "kl_coef")}
    assert algo == {"batch_size": 32, "minibatches": 2, "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.01}
    assert table["algo"]["kl_kind"] == "k3"
    assert table["async"]["max_staleness"] == 0
    assert table["optimizer"]["betas"] == [0.9, 0.98]
    assert table["trainer"]["max_tokens_per_microbatch"] == 2 * 9216
    assert table["eval"]["sets"]["aime"] == {"path": "/e.jsonl", "num_samples": 16}
    assert table["sglang"]["cuda_graph_bs"] == [1, 2, 4]
    assert table["rollout"]["workflow"] == "mine:generate"
    assert "temperature" not in table["rollout"]
    assert table["roles"]["rollout"] == {"kind": "sglang", "nodes": [0], "count": 4, "devices": "0-7"}
    assert table["memory"]["share"] == "switch"
    assert any("--no-such-thing 7" in said for said in one.lists["unknown"])
    hand = "\n".join(one.lists["hand"])
    assert all(name in hand for name in ("--sglang-port", "--rollout-temperature", "--custom-generate", "--wandb-key"))
    assert "s3cr3t" not in one.text()


def test_arguments_of_the_caller_add_no_value_and_counting_makes_a_variable_unknown(tmp_path: Path) -> None:
    text = """N=4
((N*=2))
M=1
((M++))
L[0]=9
: "${K:=6}"
python3 train.py --hf-checkpoint /m --num-rollout $N --lr ${M} --eps-clip ${L} --rollout-seed $K --rollout-batch-size 32 "$@"
"""
    one, table = made("slime", text, tmp_path)
    assert table["algo"]["batch_size"] == 32 and table["run"]["seed"] == 6
    assert "num_steps" not in table["run"] and table["optimizer"]["lr"] == 1e-6
    said = "\n".join(one.lists["said"])
    assert all(word in said for word in ("N*=2", "M++", "L[0]=9", '"$@" adds what the script')), said


def test_a_switch_that_was_taken_over_is_not_said_to_have_no_counterpart(tmp_path: Path) -> None:
    buffer = "reward_model.overlong_buffer"
    text = f"""python3 -m verl.trainer.main_ppo actor.use_kl_loss=True actor.kl_loss_coef=0.01 data.max_response_length=900 \\
  reward_model.reward_manager=dapo {buffer}.enable=True {buffer}.len=90 algorithm.adv_estimator=grpo rollout.n=4
"""
    one, table = made("verl", text, tmp_path)
    assert table["algo"]["kl_coef"] == 0.01
    assert table["reward"] == {"overlong_tokens": 900, "overlong_buffer": 90, "overlong_penalty": 1}
    listed = "\n".join(line for lines in one.lists.values() for line in lines)
    assert "use_kl_loss" not in listed and f"{buffer}.enable" not in listed


def test_async_slime_on_gpus_of_its_own(tmp_path: Path) -> None:
    text = "python train_async.py --hf-checkpoint /m --num-rollout 5 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
    _, table = made("slime", text, tmp_path)
    assert table["async"]["max_staleness"] == 1
    assert (table["roles"]["trainer"]["devices"], table["roles"]["rollout"]["devices"]) == ("0-3", "4-7")


@pytest.mark.parametrize(
    ("peer", "arguments", "key", "value"),
    [
        ("slime", "--lr-warmup-fraction 0.1 --num-rollout 100 --num-steps-per-rollout 4", "optimizer.warmup_steps", 40),
        ("slime", "--lr-warmup-fraction 0.1 --num-rollout 9 --lr-decay-iters 50", "optimizer.warmup_steps", 5),
        ("slime", "--lr-warmup-iters 7 --num-rollout 9 --num-steps-per-rollout 4", "optimizer.warmup_steps", 7),
        (
            "slime",
            "--eval-prompt-data a /e --rollout-temperature 0.8 --rollout-top-p 0.9",
            "eval.sets.a.temperature",
            0.8,
        ),
        (
            "slime",
            "--eval-prompt-data a /e --rollout-temperature 0.8 --eval-temperature 0",
            "eval.sets.a.temperature",
            0,
        ),
        ("verl", "actor.optim.lr_warmup_steps=10 data.train_batch_size=1024", "optimizer.warmup_steps", 40),
        (
            "verl",
            "actor.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=5 data.train_batch_size=1024 actor.ppo_epochs=20",
            "optimizer.warmup_steps",
            40,
        ),
        ("verl", "actor.clip_ratio=0.4", "algo.clip_high", 0.2),
        ("verl", "actor.clip_ratio=0.4 actor.clip_ratio_high=0.28", "algo.clip_high", 0.28),
        (
            "verl",
            "actor.ppo_max_token_len_per_gpu=1000 actor.ulysses_sequence_parallel_size=4",
            "trainer.max_tokens_per_microbatch",
            4000,
        ),
    ],
)
def test_units_and_defaults_are_those_of_the_other_program(
    peer: Peer, arguments: str, key: str, value: float, tmp_path: Path
) -> None:
    """As their sources have it: slime's schedule counts updates, verl's training steps; verl's `clip_ratio` is read
    only where `clip_ratio_low` and `clip_ratio_high` are null, and these are 0.2 unless they are set."""
    program = "python train.py" if peer == "slime" else "python -m verl.trainer.main_ppo"
    one, table = made(peer, f"{program} {arguments}", tmp_path)
    for name in key.split("."):
        table = table[name]
    assert table == value
    kept = {name for _, _, names in one.values.values() for name in names}
    assert not [said for said in one.lists["gone"] if said.split(" ")[0].lstrip("-") in kept], "in use, and not needed"


def test_the_fewest_values_are_left_out_for_what_the_loader_refuses(tmp_path: Path) -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --actor-num-gpus-per-node 8 --n-samples-per-prompt 8"
    context = "--rollout-max-context-len 8 --rollout-max-response-len 512"
    one, table = made("slime", f"python train.py {sizes} {context}", tmp_path)
    assert (table["megatron"], table["roles"]["trainer"]["count"]) == ({"tp": 2}, 8)
    assert ("context_length" in table.get("engine", {})) + ("max_new_tokens" in table.get("rollout", {})) == 1
    left_out = [said for said in one.lists["hand"] if "was left out" in said]
    assert len(left_out) == 2 and "--pipeline-model-parallel-size 3" in left_out[0] + left_out[1]


def test_what_would_make_another_run_is_not_dropped(tmp_path: Path) -> None:
    """GPUs that others may use, a checkpoint, an evaluation without training."""
    words = "rollout.val_kwargs.top_p=0.7 trainer.resume_from_path=/c/global_step_20 trainer.val_only=True"
    script = f"export CUDA_VISIBLE_DEVICES=4,5\npython -m verl.trainer.main_ppo {words} trainer.resume_mode=auto"
    one, _ = made("verl", script, tmp_path)
    hand = "".join(one.lists["hand"])
    assert all(text in hand for text in ("val_kwargs.top_p 0.7", "training starts from model.path", "no run only"))
    assert "line 1: CUDA_VISIBLE_DEVICES=4,5: name these GPUs in roles" in one.lists["said"][0]
    one, _ = made("verl", script.replace("True", "False"), tmp_path)
    assert "trainer.val_only false (line 2): changes nothing as it is set" in one.lists["gone"]


def test_turns_on_the_gpus_of_several_nodes(tmp_path: Path) -> None:
    text = (
        "python train.py --hf-checkpoint /m --num-rollout 5 --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate"
    )
    _, table = made("slime", text, tmp_path)
    assert table["memory"]["share"] == "switch"
    assert [table["roles"][role]["nodes"] for role in ("trainer", "rollout", "memory")] == [[0, 1]] * 3


def test_supervised_slime(tmp_path: Path) -> None:
    words = "--loss-type sft_loss --hf-checkpoint /m --prompt-data /c.parquet --input-key messages --num-epoch 3"
    _, table = made("slime", words, tmp_path)
    assert (table["algo"]["kind"], table["data"]["preset"], table["data"]["max_passes"]) == ("sft", "chat", 3)


def test_a_script_of_verl(tmp_path: Path) -> None:
    one, table = made("verl", VERL, tmp_path)
    assert table["data"]["train"] == ["/d/a.parquet", "/d/b.parquet"]
    assert (table["algo"]["batch_size"], table["algo"]["minibatches"]) == (1024, 4)
    assert (table["algo"]["kl_coef"], table["rollout"]["num_samples"]) == (0.001, 5)
    assert table["monitor"]["options"]["wandb"]["project"] == "p"
    assert "odd.key" in "".join(one.lists["unknown"])
    said = "\n".join(one.lists["said"])
    assert all(name in said for name in ("--config-name", "~trainer.gone", "$@"))


def test_a_hydra_config(tmp_path: Path) -> None:
    text = (
        "data: {train_files: /a.parquet, train_batch_size: 64}\n"
        "actor_rollout_ref:\n  model: {path: '${oc.env:MODEL}/m'}\n  rollout: {n: 4, temperature: '${x.y}'}\n"
        "  actor: {ppo_mini_batch_size: '${data.train_batch_size}', clip_ratio: '${.clip_ratio}'}\n"
    )
    one, table = made("verl", text, tmp_path, "c.yaml")
    assert table["algo"]["minibatches"] == 1
    assert table["model"]["path"] == "model", "no path can begin with a variable"
    assert "model.path ${oc.env:MODEL}/m (line 3)" in "".join(one.lists["hand"])
    assert "rollout.temperature" in "".join(one.lists["hand"])


def test_sums_of_a_script_of_verl(tmp_path: Path) -> None:
    text = "P=$((1024 * 2))\nR=${R:-$((P*3+8/2))}\npython -m verl.trainer.main_ppo data.max_prompt_length=$P \\\n"
    one, table = made("verl", f"{text} data.max_response_length=$R data.train_batch_size=$((P-$(nproc)))\n", tmp_path)
    assert (table["data"]["max_prompt_tokens"], table["rollout"]["max_new_tokens"]) == (2048, 6148)
    assert "data.train_batch_size" in "".join(one.lists["hand"])


def test_what_a_block_or_the_caller_decides_is_not_guessed(tmp_path: Path) -> None:
    text = (
        'LR=1e-6; N=8\nif [ -n "$X" ]; then LR=2e-6; A+=(--gamma 0.5); fi\nread N\nfunction f {\n N=3\n}\n'
        "cat <<END\n--lr 9 '\nEND\nA=(--lambd 0.9)\npython train.py --lr $LR --lr-decay-iters $N --eps-clip $1 ${A[@]} $@ >x 2>&1"
    )
    one, table = made("slime", text, tmp_path)
    assert table["algo"]["lam"] == 0.9
    assert {"lr", "lr-decay-iters", "eps-clip", "lambd"} == set(one.arguments.by_name)
    hand = "\n".join(one.lists["hand"])
    assert all(name in hand for name in ("--lr ", "--lr-decay-iters", "--eps-clip"))
    assert "--gamma 0.5" in one.text()
    assert "$@" in one.text()


def test_what_may_or_may_not_be_done_is_not_guessed(tmp_path: Path) -> None:
    text = (
        'A=1e-6 B=2e-6 C=3e-6\n[ -n "$X" ] && A=1\ntest -f x || B=2; true && D=(--gamma 0.5)\n'
        "for C in 1 2; do python train.py --lr $A --min-lr $B --adam-eps $C ${D[@]}; done\n"
    )
    one, _ = made("slime", text, tmp_path)
    hand = "\n".join(one.lists["hand"])
    assert all(name in hand for name in ("--lr ", "--min-lr ", "--adam-eps "))
    assert "--gamma 0.5" in one.text()


def test_words_are_split_and_joined_as_bash_does(tmp_path: Path) -> None:
    """Where bash is there, it prints the words that the reader must find."""
    text = """X="a b" Y='$X' EMPTY=; A=(--one "$X" --two $X '--three' "x\\"y" --four=$Y); A+=(--five "${N:-"p q"}" "$((2*3))" '' --nine "${EMPTY-d}" "${EMPTY:-e}" "$(((1-8)/2))")\n"""
    call = 'python train.py --zero a\\ b\'c\'"d" ${A[@]+x} "${A[@]}" --six "" $EMPTY --sev#en 7 # --eight 8\n'
    call = call.replace("${A[@]+x} ", "")
    one, _ = made("slime", text + call, tmp_path)
    assert {name: value for name, (value, _) in one.arguments.by_name.items()} == {
        "zero": "a bcd", "one": "a b", "two": ["a", "b"], "three": 'x"y', "four": "$X", "five": ["p q", "6", ""],
        "nine": ["", "e", "-3"],
        "six": "", "sev#en": "7",
    }  # fmt: skip
    bash = shutil.which("bash")
    if bash is not None:
        script = text + call.replace("python train.py", "printf '%s\\n'")
        said = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=20, check=True, env={})
        words = '--zero|a bcd|--one|a b|--two|a|b|--three|x"y|--four=$X|--five|p q|6||--nine||e|-3|--six||--sev#en|7'
        assert said.stdout.splitlines() == words.split("|")


@pytest.mark.parametrize("peer", ["slime", "verl"])
@pytest.mark.parametrize(
    "text",
    ["A=('x", 'python train.py --lr "1', "A=(--lr 1", "echo ${A", "echo $(a", "cat <<END\nx", "", "ls\n", "\0", "(" * 99,
     "$(" * 9 + ")" * 9, "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x --lr 1\n", "pip install x --upgrade y.z=1\n", "\udcff", "x" * (1 << 19)],
)  # fmt: skip
def test_refused(peer: Peer, text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError):
        migrate(peer, tmp_path / "run.sh")


def test_overrides_without_end_are_refused_soon(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python -m verl.trainer.main_ppo " + "a.b=1 " * 40_000)
    begin = time.process_time()
    with pytest.raises(ConfigError, match="more than"):
        migrate("verl", tmp_path / "run.sh")
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    (os.mkfifo if kind == "fifo" else os.mkdir)(tmp_path / "run.sh")
    with pytest.raises(ConfigError):
        migrate("slime", tmp_path / "run.sh")


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxx\n" + 'A="$A$A"\n' * 60,
        "A=(1 2 3 4)\n" + "A+=(${A[@]})\n" * 40,
        "A=9999999\n" + "A=$((A*A))\n" * 60,
        "A=" + "9" * 90_000 + "\nB=$((" + "A " * 40_000 + "))\n",
        "A=${A:-${A:-${A:-$A}}}\nB=$B\n",
        "<<A " * 30_000 + "\n",
        "a=${" * 30_000 + "\n",
        "'' " * 60_000 + "\n",
        "a\\" * 60_000 + "\n",
        "$((" * 30_000,
        "".join(f"--a{number} " for number in range(20_000)),
        "--a\n" * 60_000,
        "python train.py --a 1 " + "if\n" * 60_000,
    ],
)
def test_hostile_scripts_end_soon(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text + "python train.py --lr $A")
    begin = time.process_time()
    with contextlib.suppress(ConfigError):
        assert len(migrate("slime", tmp_path / "run.sh").text()) < 10_000
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "text",
    ["a: &a [1, 2]\nb: &b [*a, *a]\n", "[" * 2000, "a: [", "x: !!python/object/apply:os.getcwd []", "- 1\n- 2\n", "a: !!int ''",
     "".join(f"a{number}: 1\n" for number in range(3000)), "a: 1\n" * 5000],
)  # fmt: skip
def test_refused_configs(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError):
        migrate("verl", tmp_path / "c.yaml")


def test_what_is_given_twice_counts_last_and_is_said(tmp_path: Path) -> None:
    one, table = made("slime", "python train.py --lr 1e-6 --lr 3e-6", tmp_path)
    assert table["optimizer"]["lr"] == 3e-6
    other, table = made("verl", "data: {seed: 1}\ndata: {seed: 2}\n", tmp_path, "c.yaml")
    assert table["run"]["seed"] == 2
    assert all("again" in each.text() for each in (one, other))


def test_nothing_is_run(tmp_path: Path) -> None:
    text = f"touch {tmp_path}/a\nX=$(touch {tmp_path}/b)\nY=`touch {tmp_path}/c`\necho >{tmp_path}/d\n"
    made("slime", f"{text}python train.py --lr 1e-5 --save $X$Y >{tmp_path}/e", tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"run.sh"}


def test_secrets_are_never_written(tmp_path: Path) -> None:
    text = """if x; then A=(--wandb-key s3cr3t1); fi\npython train.py --lr 1e-6 --wandb-key s3cr3t2 --sglang-api-key s3cr3t3 \\
    --train-env-vars '{"WANDB_API_KEY": "s3cr3t4"}' ${WANDB_KEY:-s3cr3t5} --odd "password=s3cr3t6"\n"""
    one, _ = made("slime", text, tmp_path)
    assert "s3cr3t" not in one.text()


@pytest.mark.parametrize("peer", ["slime", "verl"])
def test_any_value_is_taken_or_listed(peer: Peer, tmp_path: Path) -> None:
    seed = 7
    print(f"seed {seed}")
    drawn = random.Random(seed)
    values = (
        "-1",
        "0",
        "8",
        "1.5",
        "1e999",
        "nan",
        "true",
        "False",
        "''",
        "x",
        "a.b.c",
        "${GAP}",
        "[1,2]",
        "[null]",
        "null",
    )
    values += ("99999999999", "{}", "'[1, {}]'", "$((2*3))", "'#x'", "sft_loss", "wandb", "'é'")
    values += ('"a\x07\x7f"', "1 x", "[1] null ''") if peer == "slime" else ()  # YAML has no such letters
    names = [name for row in rows(peer) for name in (row.only_if, *row.names) if re.match("[a-z*]", name)]
    for _ in range(8):
        some = [name.replace("*", drawn.choice(("a", "b-c", "a.b", "api-key"))) for name in drawn.sample(names, 30)]
        form = "--{} {}" if peer == "slime" else "{}={}"
        words = [form.format(name, drawn.choice(values)) for name in some]
        text = "python -m verl.trainer.main_ppo " if peer == "verl" else "python train.py "
        made(peer, text + " ".join(words), tmp_path)


def test_hostile_values(tmp_path: Path) -> None:
    """Each of them once made a file that did not load, or used up all memory."""
    arguments = (
        "--max-tokens-per-gpu x --context-parallel-size 99999999999",
        "--actor-num-nodes 99999999999 --actor-num-gpus-per-node x",
        "--eps-clip-c -1 null a",
        "--rollout-max-context-len 8",
        "--eval-prompt-data a.b /f 'c]' /g",
        "'--sglang-a.b\"]' 1",
        "'--sglang-.' 1 '--sglang-' 2 '--sglang-a' 3 '--sglang-a.b' 4",
    )
    for each in arguments:
        made("slime", f"python train.py {each}", tmp_path)


def test_the_same_file_makes_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    texts = set[str]()
    for seed in ("1", "2"):
        asked = [sys.executable, "-m", "myxa", "migrate", "slime", "run.sh"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        texts.add(
            subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60).stdout
        )
    assert len(texts) == 1
    assert "num_steps" in texts.pop()


@pytest.mark.parametrize(("peer", "text"), [("slime", SLIME), ("verl", VERL)])
def test_what_is_made_can_be_planned(peer: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert main(["migrate", peer, str(tmp_path / "run.sh")]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert main(["plan", str(tmp_path / "run.toml"), "--elsewhere"]) == 0, capsys.readouterr().out
    assert "GPU 7   trainer/7 rollout/3" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    assert main(["migrate", "slime", str(tmp_path / "run.sh")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["model"]["path"] == "/data/m"
    assert main(["migrate", "verl"]) == 0
    assert re.search(r"^rollout\.n +\| rollout\.num_samples", capsys.readouterr().out, re.M)
    assert main(["migrate", "slime", str(tmp_path / "none")]) == 2
