#!/usr/bin/env bash
# GRPO, or PPO with a critic, on Qwen3-4B, judged by the two sources of qreward.yaml. One node with eight GPUs of 80 GB,
# slime 0.3.1.
#
# Usage: recipes/slime/run.sh grpo|ppo [--dry-run [--offline]] [slime's flags ...]     a flag given here wins over the
#                             recipe's
#   --dry-run                 check everything, print one table, and start nothing; --offline: ask no judge either
#   QREWARD_CONFIG            the judges; default: qreward.yaml beside this script. A file of recipes/judges works, too
#   QREWARD_JOURNAL           where verdicts are recorded; default: qreward-RECIPE.sqlite in the current folder
#   QREWARD_RULES             the file of the rules; default: recipes/judges/rules.py
#   JUDGE_BASE_URL, HOSTED_BASE_URL, HOSTED_MODEL, HOSTED_API_KEY ...    the variables that this file names
#   QREWARD_ENV               names of further variables that the run needs, e.g. WANDB_API_KEY
#   QREWARD_DRY_RUN=1         print what would be run, with all these variables masked, and stop
#   SLIME_DIR, MEGATRON_DIR, HF_CHECKPOINT, REF_LOAD, SAVE, PROMPT_DATA, EVAL_DATA    paths. The defaults are those of
#                             slime's Docker image, below /root; elsewhere set all of them. The script stops before it
#                             starts anything, and names every path that does not exist
#   RAY_API_SERVER_ADDRESS    a running Ray cluster; default: one is started on this machine

# Tracing, as in `bash -x`, would print keys.
set +x
set -euo pipefail

usage="usage: recipes/slime/run.sh grpo|ppo [--dry-run [--offline]] [slime's flags ...]"
recipe=${1:-}
if [[ $recipe != grpo && $recipe != ppo ]]; then
    echo "$usage" >&2
    exit 2
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=recipes/common.sh
source "$(dirname "$here")/common.sh"
take_dry_run "${@:2}"
set -- ${rest[@]+"${rest[@]}"}

slime=${SLIME_DIR:-/root/slime}
megatron=${MEGATRON_DIR:-/root/Megatron-LM}
checkpoint=${HF_CHECKPOINT:-/root/Qwen3-4B}
checkpoint=${checkpoint%/}
reference=${REF_LOAD:-${checkpoint}_torch_dist}
save=${SAVE:-${checkpoint}_qreward_$recipe}
prompts=${PROMPT_DATA:-/root/dapo-math-17k/dapo-math-17k.jsonl}
evaluation=${EVAL_DATA:-/root/aime-2024/aime-2024.jsonl}
config=${QREWARD_CONFIG:-$here/qreward.yaml}
journal=${QREWARD_JOURNAL:-qreward-$recipe.sqlite}
rules=${QREWARD_RULES:-$(dirname "$here")/judges/rules.py}
dry_run=${QREWARD_DRY_RUN:-}
make_absolute slime megatron checkpoint reference save prompts evaluation config journal rules

export QREWARD_JOURNAL=$journal QREWARD_RULES=$rules

need SLIME_DIR "$slime/train.py" "a checkout of slime"
need SLIME_DIR "$slime/scripts/models/qwen3-4B.sh"
need MEGATRON_DIR "$megatron"
need HF_CHECKPOINT "$checkpoint" "hf download Qwen/Qwen3-4B --local-dir $checkpoint"
need REF_LOAD "$reference" "make it from HF_CHECKPOINT with slime's tools/convert_hf_to_torch_dist.py"
need PROMPT_DATA "$prompts" "hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $(dirname "$prompts")"
need EVAL_DATA "$evaluation" "hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $(dirname "$evaluation")"
need QREWARD_CONFIG "$config"
if [[ -e $config ]] && ! grep -qE '^(qreward|sources):' "$config"; then
    missing+=("QREWARD_CONFIG: $config has no key \`qreward\` at its top, which slime passes on")
fi
carry_variables "$config"
if [[ ! $dry_run ]]; then
    command -v qreward >/dev/null || missing+=("qreward: not installed (pip install . beside slime)")
    command -v ray >/dev/null || missing+=("ray: not installed; run this where slime runs")
fi
[[ $table ]] || stop_if_missing

# Sets MODEL_ARGS, the model's shape, which Megatron does not read from a checkpoint.
MODEL_ARGS=()
if [[ -e $slime/scripts/models/qwen3-4B.sh ]]; then
    # shellcheck source=/dev/null
    source "$slime/scripts/models/qwen3-4B.sh"
fi

reward_args=(
    --custom-rm-path slime_adapter.reward
    # Checks flags and configuration in the process that scores, before slime loads the model.
    --data-source-path slime_adapter.DataSource
    # Keeps failed samples out of the mean and the deviation of their group, which the loss mask does not.
    --custom-reward-post-process-path slime_adapter.post_process
    # Both add metrics to slime's own.
    --custom-rollout-log-function-path slime_adapter.log_rollout
    --custom-eval-rollout-log-function-path slime_adapter.log_eval
)
# slime passes on what is below `qreward`. A file without that key is named in the environment of the job instead.
if grep -q '^sources:' "$config" 2>/dev/null; then
    named=$config
else
    named=
    reward_args+=(--custom-config-path "$config")
fi

rollout_args=(
    --prompt-data "$prompts"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 3000
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

eval_args=(
    --eval-interval 20
    --eval-prompt-data aime "$evaluation"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)

checkpoint_args=(
    --hf-checkpoint "$checkpoint"
    --ref-load "$reference"
    --load "$save/actor"
    --save "$save/actor"
    --save-interval 20
)

if [[ $recipe == grpo ]]; then
    rollout_args+=(
        --rollout-batch-size 32
        --n-samples-per-prompt 8
        # Replaces groups that have too few rewards (`groups` in qreward.yaml) with other prompts.
        # slime_adapter.drop_failed_and_flat_groups drops those whose rewards are all alike as well.
        --dynamic-sampling-filter-path slime_adapter.drop_failed_groups
        # Eight groups to spare. Without them a single dropped group would start a whole further round; with them the
        # step waits neither for a failed group nor for the slowest verdicts, and pays for up to a quarter more of them.
        # --partial-rollout keeps the spare rollouts for the next step, whose policy is then another one.
        --over-sampling-batch-size 40
    )
    algorithm_args=(
        --advantage-estimator grpo
        --use-kl-loss
        --kl-loss-coef 0.00
        --kl-loss-type low_var_kl
        --entropy-coef 0.00
        --eps-clip 0.2
        --eps-clip-high 0.28
    )
else
    # A critic needs no group to compare with: a failed sample costs itself only, so nothing is dropped or spared.
    rollout_args+=(
        --rollout-batch-size 256
        --n-samples-per-prompt 1
    )
    algorithm_args=(
        --advantage-estimator ppo
        --megatron-config-path "$save/roles.yaml"
        # Steps in which only the critic learns: an untrained one would mislead the actor.
        --num-critic-only-steps 5
        --normalize-advantages
        --use-kl-loss
        --kl-loss-coef 0.00
        --kl-loss-type low_var_kl
        --entropy-coef 0.00
        --eps-clip 0.2
    )
    # Both roles inherit the flags, and would overwrite each other's checkpoints. The critic starts from the actor's
    # weights, as slime has it, until it has a checkpoint of its own.
    roles="megatron:
  - name: default
    role: critic
    overrides:
      lr: 1.0e-5
      save: $save/critic"
    if [[ -e $save/critic/latest_checkpointed_iteration.txt ]]; then
        roles+="
      load: $save/critic"
    fi
fi

# From here to the end of misc_args as in slime's own scripts/run-qwen3-4B.sh.
performance_args=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

optimizer_args=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

sglang_args=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

# Metrics go to TENSORBOARD_DIR. For Weights & Biases: --use-wandb, and QREWARD_ENV=WANDB_API_KEY.
logger_args=(
    --use-tensorboard
    --tb-project-name "$save/tensorboard"
    --tb-experiment-name "qreward_$recipe"
)

misc_args=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

train=(
    python3 "$slime/train.py"
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    "${MODEL_ARGS[@]}"
    "${checkpoint_args[@]}"
    "${rollout_args[@]}"
    "${optimizer_args[@]}"
    "${algorithm_args[@]}"
    "${performance_args[@]}"
    "${eval_args[@]}"
    "${sglang_args[@]}"
    "${misc_args[@]}"
    "${logger_args[@]}"
    "${reward_args[@]}"
    "$@"
)

nvlink=0
if [[ $(nvidia-smi topo -m 2>/dev/null || true) =~ NV[0-9] ]]; then
    nvlink=1
fi

job_env() {
    runtime_env "$1" "PYTHONPATH=$megatron:$slime${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS=1 \
        "NCCL_NVLS_ENABLE=$nvlink" QREWARD_JOURNAL QREWARD_RULES ${named:+"QREWARD_CONFIG=$named"}
}

# From a file and not as --runtime-env-json: this command runs as long as the training does, and everybody on the
# machine can read its arguments.
submit=(ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --runtime-env /dev/stdin --)

if [[ $table ]]; then
    for text in "${missing[@]}"; do
        options+=(--missing "$text")
    done
    # From train.py on: what slime parses. The parsers belong to slime and Megatron.
    export PYTHONPATH="$megatron:$slime${PYTHONPATH:+:$PYTHONPATH}"
    exec python3 "$(dirname "$here")/dry_run.py" "${options[@]}" slime "$config" -- "${train[@]:2}"
fi

if [[ $dry_run ]]; then
    [[ -z ${roles:-} ]] || printf '# %s\n%s\n' "$save/roles.yaml" "$roles"
    printf '# runtime environment\n%s\n# command\n' "$(job_env mask)"
    printf '%q ' "${submit[@]}" "${train[@]}"
    echo
    exit
fi

check_judges "$config"

mkdir -p "$save"
# slime hands the file on; named in the environment as well, which a Ray started here inherits, it would be read twice.
unset QREWARD_CONFIG
[[ -z ${roles:-} ]] || printf '%s\n' "$roles" >"$save/roles.yaml"
export PYTHONUNBUFFERED=1
if [[ -z ${RAY_API_SERVER_ADDRESS:-} ]]; then
    # Its dashboard stays on this machine, as is Ray's default: it runs whatever anybody who reaches it submits.
    if ! ray start --head --node-ip-address "${MASTER_ADDR:-127.0.0.1}" --num-gpus 8 --disable-usage-stats; then
        echo "$script: to use a Ray that runs already, e.g. a former run's, set RAY_API_SERVER_ADDRESS" \
            "(http://127.0.0.1:8265); to end it: ray stop" >&2
        exit 1
    fi
fi
"${submit[@]}" "${train[@]}" <<<"$(job_env '')"
