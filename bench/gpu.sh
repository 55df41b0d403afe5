#!/usr/bin/env bash
# The GPU benchmark: what one, two or four GPUs reach with the real engines.
#
#   bench/gpu.sh [--dry] [part ...]        default: facts learn rollout train
#
#   facts      what this machine is                       1 GPU, 30 s
#   rollout    rollout actor against a bare client        1 GPU, SGLang, 180 s
#   train      speed, MFU, memory of the backends         1 GPU, 120 s (with four: also DP4)
#   train_profile  where a step's time goes, and variants  1 GPU, Megatron, 320 s
#   lora       the same with adapters, beside all weights  1 GPU, Megatron, 330 s
#   lora_rollout  adapters that SGLang holds, beside merged weights  1 GPU, SGLang, 420 s
#   learn      a model from nothing learns a task         1 GPU (colocated) or 2, SGLang, 240 s
#   async20    20 asynchronous steps of a 0.6B shape      1 GPU (colocated) or 2, SGLang, 180 s
#   async_balanced  the same, training as long as generating  1 GPU (colocated) or 2, SGLang, 180 s
#   long_tail  lognormal lengths, eta 2 against eta 0     1 GPU (colocated) or 2, SGLang, 200 s
#   disaggregated  the same, a half of the GPUs for the ranks, a half for engines  4 or 8 GPUs, SGLang, 300 s
#   engine_start  a launched server's phases, started twice  1 GPU, SGLang, 260 s
#   weights    trainer to engine, first token, stall      1 GPU (same GPU) or 2, SGLang, 240 s
#   weights_experts  the same of 30B with 128 experts a layer  2 GPUs, SGLang, Megatron, 240 s
#   weights_experts_fp8  into a server in FP8, quantised on the way  2 GPUs, SGLang, Megatron, 240 s
#   fp8        a run with an FP8 server                   1 GPU, SGLang, 240 s
#   fp8_speed  servers in bf16 and FP8: memory, tokens/s  1 GPU, SGLang, 240 s with their start
#   speculative  tokens guessed ahead by n-grams and an MTP layer  1 GPU, SGLang, Megatron, 430 s
#   logprobs   engine against trainer, token by token     1 GPU, SGLang, 180 s
#   routing    the same of experts, with and without their replay  1 GPU, SGLang, Megatron, 240 s
#   topologies  servers of several shapes on two GPUs     2 GPUs, SGLang, 240 s
#   layouts    Megatron's layouts against HuggingFace     2 or 4 GPUs, Megatron, 240 s
#   kill       SIGKILL of a server in mid-broadcast       1 GPU (same GPU) or 2, SGLang, 120 s
#   chaos      a rank, a server, the coordinator, all die  1 GPU (same GPU) or 2, SGLang, 240 s
#   reproducible  two runs, one killed: equal to the bit?  1 GPU, SGLang, Megatron, 300 s
#   repeats_probe trainer and engine of such a run, each alone and twice  1 GPU, SGLang, Megatron, 200 s
#   agents     programs with the OpenAI SDK learn by the gateway  1 GPU, SGLang, 300 s
#   peer_trl   TRL at the work of async20                 1 GPU, TRL, 120 s
#   peer_verl  verl at the work of async20; also --cases async, separate (2 GPUs)  1 GPU, SGLang, verl, 560 s
#   peer_verl_learn  verl and myxa learn the task of learn  1 GPU, SGLang, verl, 560 s
#   live       tuned while it goes, through its socket    1 GPU (same GPU) or 2, SGLang, 150 s
#   memory     all of these that this many GPUs are for; each can also be asked for by its own name:
#     memory_selfcheck      the driver's calls, the allocator    1 GPU, 30 s
#     memory_rates          copies, pinning, mapping; arenas     1 GPU, 150 s
#     memory_switch         trainer and engine take turns        1 GPU, 150 s
#     memory_colocated      a run in turns, of one or a gang     1, 2 or 4 GPUs, SGLang, Megatron, 300 s
#     memory_colocated_one  the gang with one server over all    2 or 4 GPUs, SGLang, Megatron, 250 s
#     memory_colocated_tp   the gang with tensor parallelism     2 or 4 GPUs, SGLang, Megatron, 250 s
#     memory_residue        what stays of a trainer's process    1 GPU, Megatron, 60 s
#     memory_communicators  communicators leave and come back    2 or 4 GPUs, 150 s
#     memory_experts        30B with 128 experts in turns with FP8 servers  8 GPUs, SGLang, Megatron, 560 s; asked for alone
#     memory_gang           GPUs that switch together            2 or 4 GPUs, 150 s
#     memory_gang_training  switches change no step of a gang    2 or 4 GPUs, Megatron, 120 s
#
# Figures go to gpu.md and gpu.json in $OUT (default ./bench-out), logs to logs.tar.gz there. A part that lacks something
# here says so and does not count as passed. Every part has a time limit (LIMIT_<part>, seconds; the part is told it as
# PART_SECONDS) and may be given other arguments (ARGS_<part>); nothing that it started outlives it. GPU_BUDGET: seconds
# for all parts together; what does not fit is cut short or not begun. --dry runs tiny shapes on the CPU.
# GPU_BACKEND=torch|megatron, GPU_ENGINE=attach|launched: who trains, and who starts SGLang where a run could do either.
# PYTHON: the interpreter that has torch, SGLang and megatron-core. Exit status 0: everything asked for passed.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
dry=""
[ "${1:-}" = "--dry" ] && { dry=1; shift; }
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(facts learn rollout train)

export OUT=${OUT:-$PWD/bench-out}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
made_work=""
[ -n "${GPU_WORK:-}" ] || { GPU_WORK=$(mktemp -d); made_work=$GPU_WORK; }
export GPU_WORK PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}  # SGLang sets the latter
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1} NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
export CUDA_DEVICE_ORDER=PCI_BUS_ID  # the numbers of nvidia-smi and NVML
mkdir -p "$GPU_WORK"
cd "$GPU_WORK" || exit 1

building=""
pack() {
  [ -z "$building" ] || kill "$building" 2>/dev/null
  find . -type f \( -name '*.log' -o -name metrics.jsonl -o -name events.jsonl -o -name 'memory.*.jsonl' \) -size -8M -print0 2>/dev/null \
    | tar czf "$OUT/logs.tar.gz" --null -T - 2>/dev/null
  cd / && [ -z "$made_work" ] || rm -rf "$made_work"
}
trap pack EXIT

if ! "$python" -c 'import myxa.core' 2>/dev/null; then  # not installed: the checkout is the package
  mkdir -p names && ln -sfn "$(dirname "$here")" names/myxa
  export PYTHONPATH="$GPU_WORK/names${PYTHONPATH:+:$PYTHONPATH}"
fi

num_gpus=0
command -v nvidia-smi >/dev/null && num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
placement=colocated
[ "$num_gpus" -ge 2 ] && placement=two
budget=${GPU_BUDGET:-0}
engine=${GPU_ENGINE:-attach} backend=${GPU_BACKEND:-torch}
ranks=$((num_gpus >= 4 ? 4 : 2))
turns=""
[ "$num_gpus" -ge 2 ] && turns="--gpus $ranks --ways ours --mem-fraction 0.85,0.8"
dying=$placement
[ "$num_gpus" -ge 2 ] && dying=gang

start=150  # for servers of SGLang to load, which compile kernels on a fresh machine: a part's own limit counts after it

declare -A script=(
  [lora_rollout]=lora_rollout.py
  [topologies]=topologies.py
  [facts]=facts.py [rollout]=rollout_speed.py [train]=train_speed.py [train_profile]=train_speed.py [train4]=train_speed.py [lora]=train_speed.py [learn]=learn.py
  [async20]=async20.py [async_balanced]=async20.py [long_tail]=long_tail.py [disaggregated]=long_tail.py [engine_start]=engine_start.py [weights]=weights_latency.py [weights_experts]=weights_experts.py [weights_experts_fp8]=weights_experts.py [fp8]=fp8.py [fp8_speed]=fp8_speed.py [logprobs]=logprob_gap.py [routing]=routing.py [speculative]=speculative.py [layouts]=layouts.py
  [kill]=kill_in_broadcast.py [live]=live.py [chaos]=chaos.py [reproducible]=repeats.py
  [repeats_probe]=repeats_probe.py [agents]=agents.py [peer_trl]=trl_step.py [peer_verl]=verl_step.py [peer_verl_learn]=verl_learn.py
  [memory_selfcheck]=memory_selfcheck.py [memory_rates]=memory_rates.py [memory_switch]=memory_switch.py
  [memory_colocated]=memory_colocated.py [memory_residue]=memory_residue.py
  [memory_experts]=memory_colocated.py [memory_colocated_one]=memory_colocated.py [memory_colocated_tp]=memory_colocated.py
  [memory_communicators]=memory_communicators.py [memory_gang]=memory_gang.py
  [memory_gang_training]=memory_gang_training.py
)
declare -A limit=(
  [lora_rollout]=430
  [topologies]=300 [weights_experts_fp8]=240
  [facts]=60 [rollout]=270 [train]=270 [train_profile]=340 [train4]=200 [lora]=480 [learn]=500 [async20]=330 [async_balanced]=330 [long_tail]=270 [disaggregated]=420 [engine_start]=200 [weights]=420 [weights_experts]=420 [fp8]=430 [fp8_speed]=90 [logprobs]=360 [routing]=420 [speculative]=430 [layouts]=330
  [kill]=230 [live]=240 [chaos]=460 [reproducible]=560 [repeats_probe]=230
  [agents]=580 [peer_trl]=240 [peer_verl]=575 [peer_verl_learn]=575
  [memory_selfcheck]=90 [memory_rates]=200 [memory_switch]=180 [memory_colocated]=$((num_gpus >= 2 ? 380 : 300))
  [memory_experts]=420 [memory_colocated_one]=330 [memory_colocated_tp]=330 [memory_residue]=90 [memory_communicators]=240
  [memory_gang]=170 [memory_gang_training]=270
)
declare -A gpus=(
  [lora_rollout]=1
  [topologies]=2 [weights_experts_fp8]=2
  [facts]=1 [rollout]=1 [train]=1 [train_profile]=1 [train4]=4 [lora]=1 [learn]=1 [async20]=1 [async_balanced]=1 [long_tail]=1 [disaggregated]=4 [engine_start]=1 [weights]=1 [weights_experts]=2 [fp8]=1 [fp8_speed]=1 [logprobs]=1 [routing]=1 [speculative]=1 [layouts]=2
  [kill]=1 [live]=1 [chaos]=1 [reproducible]=1 [repeats_probe]=1 [agents]=1 [peer_trl]=1 [peer_verl]=1 [peer_verl_learn]=1
  [memory_selfcheck]=1 [memory_rates]=1 [memory_switch]=1 [memory_colocated]=1 [memory_residue]=1
  [memory_experts]=8 [memory_colocated_one]=2 [memory_colocated_tp]=2
  [memory_communicators]=2 [memory_gang]=2 [memory_gang_training]=2
)
declare -A modules=(
  [lora_rollout]=sglang
  [topologies]=sglang [weights_experts_fp8]="sglang megatron.core"
  [facts]="" [rollout]=sglang [train]="" [train_profile]=megatron.core [train4]="" [lora]=megatron.core [learn]=sglang [async20]=sglang [async_balanced]=sglang [long_tail]=sglang [disaggregated]=sglang [engine_start]=sglang [weights]=sglang [weights_experts]="sglang megatron.core" [fp8]=sglang [fp8_speed]=sglang [logprobs]=sglang [routing]="sglang megatron.core" [speculative]="sglang megatron.core"
  [layouts]="megatron.core transformers pytest" [kill]=sglang [live]=sglang [chaos]=sglang
  [reproducible]="sglang megatron.core" [repeats_probe]="sglang megatron.core" [agents]="sglang openai" [peer_trl]="trl datasets" [peer_verl]="verl ray" [peer_verl_learn]="verl ray"
  [memory_selfcheck]="" [memory_rates]="" [memory_switch]=""
  [memory_colocated]="sglang megatron.core torch_memory_saver" [memory_residue]=megatron.core
  [memory_experts]="sglang megatron.core torch_memory_saver"
  [memory_colocated_one]="sglang megatron.core torch_memory_saver"
  [memory_colocated_tp]="sglang megatron.core torch_memory_saver"
  [memory_communicators]="" [memory_gang]="" [memory_gang_training]=megatron.core
)
declare -A arguments=(
  [lora_rollout]="--engine attach --backend $backend"
  [topologies]=""
  [facts]="" [rollout]="" [train]="--cases $backend:0.6b,$backend:1.7b" [train4]="--part train4 --world 4 --cases $backend:1.7b"
  [train_profile]="--part train_profile --profile --steps 2 --limit 108 --cases torch:0.6b,torch:1.7b,megatron:0.6b"
  [lora]="--part lora --checkpoint --limit 130 --cases torch:0.6b:16,torch:0.6b,megatron:0.6b:16,megatron:0.6b,torch:1.7b:16,torch:1.7b"
  [learn]="--placement $placement --engine $engine --backend $backend"
  [async20]="--placement $placement --engine $engine --backend $backend"
  [async_balanced]="--balanced --placement $placement --engine $engine --backend $backend"
  [long_tail]="--placement $placement --engine $engine --backend $backend"
  [disaggregated]="--placement halves --gpus $num_gpus --backend $backend --shape 1.7b --part disaggregated" [engine_start]="--backend $backend"
  [weights]="--placement $placement --backend $backend" [weights_experts]="" [weights_experts_fp8]="--fp8" [fp8]="--backend $backend" [fp8_speed]="" [logprobs]="--backends $backend" [routing]="" [speculative]="" [layouts]="--ranks $ranks"
  [kill]="--placement $placement --backend $backend" [live]="--placement $placement --backend $backend"
  [chaos]="--placement $dying --backend $backend --ranks $((num_gpus >= 2 ? ranks : 1))"
  [reproducible]="" [repeats_probe]="" [agents]="--backend $backend" [peer_trl]="" [peer_verl]="" [peer_verl_learn]=""
  [memory_selfcheck]="" [memory_rates]="" [memory_switch]="" [memory_colocated]="$turns"
  [memory_experts]="--gpus 8 --servers one --shape 30b-a3b --fp8 --mem-fraction 0.8 --steps 6 --tokens 8192 --part memory_experts
    --set megatron.ep=8 --set sglang.ep_size=8 --set megatron.recompute=\"full\" --set memory.workspace_mb=8192"
  [memory_colocated_one]="$turns --servers one --set megatron.tp=$((ranks / 2)) --part memory_colocated_one"
  [memory_colocated_tp]="$turns --set megatron.tp=2 --part memory_colocated_tp"
  [memory_residue]="" [memory_communicators]="--ranks $ranks --stages kill,reload,sizes --seconds 60"
  [memory_gang]="--num-devices $ranks" [memory_gang_training]="--ranks $ranks"
)
declare -A dry_arguments=(
  [lora_rollout]="--engine attach --shape 0p5m --sft-steps 30 --set run.num_steps=4 --set eval.num_prompts=16 --set algo.group_filter=none"
  [topologies]="--requests 8 --prompt-tokens 32 --num-new 16"
  [facts]="" [rollout]="--groups 4 --in-flight 2 --longest 12 --rounds 1"
  [train]="--cases torch:0.6b --packs 2 --per-pack 2 --length 64 --steps 1"
  [train_profile]="--part train_profile --profile --cases torch:0.6b --packs 2 --per-pack 2 --length 64 --steps 1"
  [lora]="--part lora --checkpoint --cases torch:0.6b:4,torch:0.6b --packs 2 --per-pack 2 --length 64 --steps 1"
  [train4]="--part train4 --world 2 --cases torch:1.7b --packs 1 --per-pack 2 --length 64 --steps 1"
  [learn]="--engine attach --shape 0p5m --sft-steps 30 --set run.num_steps=4 --set eval.num_prompts=16 --set algo.group_filter=none"
  [async20]="--engine attach --set run.num_steps=4" [async_balanced]="--balanced --engine attach --set run.num_steps=12" [long_tail]="--engine attach --steps 6" [disaggregated]="--placement halves --gpus 4 --engine embedded --steps 6 --part disaggregated" [engine_start]="--steps 2" [weights]="--updates 3" [weights_experts]="--updates 2" [weights_experts_fp8]="--updates 2 --fp8" [fp8]="--shape 0p5m --sft-steps 30 --set run.num_steps=4 --set eval.num_prompts=16 --set algo.group_filter=none" [fp8_speed]="" [logprobs]="--prompts 8 --num-new 16" [routing]="--prompts 8 --num-new 16" [speculative]="--engine attach --sft-steps 30 --set run.num_steps=4 --set eval.num_prompts=16 --set algo.group_filter=none"
  [layouts]="--ranks 2 --first 2" [kill]="--limit 100" [live]="--limit 100" [chaos]="--steps 200 --limit 300"
  [reproducible]="--steps 12" [repeats_probe]="--part trainer"
  [agents]="--shape 0p5m --sft-steps 30 --set run.num_steps=4 --set eval.num_prompts=16 --set algo.group_filter=none"
  [peer_trl]="" [peer_verl]="--cases shipped,tuned,polled,async,separate" [peer_verl_learn]="--shape 0p5m --sft-steps 30 --steps 2"
  [memory_selfcheck]="" [memory_rates]="" [memory_switch]="" [memory_colocated]=""
  [memory_experts]="--gpus 2 --servers one --part memory_experts" [memory_colocated_one]="--gpus 2 --servers one --part memory_colocated_one"
  [memory_colocated_tp]="--gpus 2 --part memory_colocated_tp"
  [memory_residue]="" [memory_communicators]="--ranks 2" [memory_gang]="--num-devices 2"
  [memory_gang_training]="--ranks 2"
)
memory=(memory_selfcheck memory_rates memory_switch memory_residue memory_colocated)
[ "$num_gpus" -ge 2 ] && memory=(memory_selfcheck memory_communicators memory_gang memory_gang_training memory_colocated
  memory_colocated_one memory_colocated_tp)
[ -n "$dry" ] && memory=(memory_selfcheck memory_rates memory_switch memory_communicators memory_gang
  memory_gang_training memory_colocated)
asked=("${parts[@]}") parts=()
for part in "${asked[@]}"; do
  if [ "$part" = memory ]; then parts+=("${memory[@]}"); else parts+=("$part"); fi
done
[ "$num_gpus" -ge 4 ] && for part in "${parts[@]}"; do [ "$part" = train ] && parts+=(train4) && break; done

has() { "$python" -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))' "$@" \
  2>/dev/null; }

lacking() { # why a part cannot run here, or nothing
  [ -e "$here/gpu/${script[$1]}" ] || { echo "${script[$1]} is not there"; return; }
  [ -n "$dry" ] && return
  [ "$num_gpus" -ge "${gpus[$1]}" ] || { echo "needs ${gpus[$1]} GPU, nvidia-smi shows $num_gpus"; return; }
  [ -z "${modules[$1]}" ] || has ${modules[$1]} || echo "$python cannot import ${modules[$1]}"
}

echo "bench/gpu.sh: ${parts[*]} on $num_gpus GPUs, $("$python" -V 2>&1), figures in $OUT" | tee -a "$OUT/gpu.md"
case "$num_gpus ${parts[*]} " in [2-9]*" memory_co"* | [2-9]*" memory_gang_training "*)  # compile beside what comes first
  "$python" -c 'from myxa.memory.communicators.reload import load; load()' & building=$! ;;
esac
summary="| part | result | seconds |
|---|---|---|"
all_passed=0
for part in "${parts[@]}"; do
  started=$SECONDS
  if [ -z "${script[$part]:-}" ]; then
    result="there is no such part; there are ${!script[*]}"
  elif why=$(lacking "$part") && [ -n "$why" ]; then
    result="NOT RUN: $why"
  elif [ "$budget" -gt 0 ] && [ $((budget - SECONDS)) -lt 25 ]; then
    result="NOT RUN: no time is left of $budget s"
  else
    args="ARGS_$part" seconds="LIMIT_$part"
    seconds=${!seconds:-${limit[$part]}}
    case "$dry ${modules[$part]} " in " "*sglang*) seconds=$((seconds + start)) ;; esac
    [ "$budget" -gt 0 ] && [ $((budget - SECONDS - 12)) -lt "$seconds" ] && seconds=$((budget - SECONDS - 12))
    chosen=${!args-${arguments[$part]}}
    [ -n "$dry" ] && chosen="--device cpu ${!args-${dry_arguments[$part]}}"
    PART_SECONDS=$seconds "$python" "$here/gpu/limited.py" "$seconds" "$python" "$here/gpu/${script[$part]}" $chosen
    case $? in
      0) result=passed ;;
      3) result="NOT RUN (see above)" ;;
      4) result="ran, a goal was missed" ;;
      124) result="ENDED at its time limit of $seconds s" ;;
      *) result=FAILED ;;
    esac
  fi
  [ "$result" = passed ] || all_passed=1
  summary+="
| $part | $result | $((SECONDS - started)) |"
done
printf '\n%s\n' "$summary" | tee -a "$OUT/gpu.md"
exit $all_passed
