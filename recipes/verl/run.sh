#!/usr/bin/env bash
# GRPO, or PPO with a critic, with verl, judged by the sources of a YAML file.
#
# Usage: recipes/verl/run.sh grpo|ppo|grpo_colocated|grpo_sleeping [--dry-run [--offline]] [hydra overrides ...]
#   --dry-run                 check everything, print one table, and start nothing; --offline: ask no judge either
#   QREWARD_CONFIG            the judges; default: judges.yaml beside this script; for grpo_colocated and grpo_sleeping
#                             colocated.yaml and sleeping.yaml of recipes/judges
#   HOSTED_BASE_URL, HOSTED_MODEL, HOSTED_API_KEY ...    the variables that this file names
#   MODEL, TRAIN_DATA, VAL_DATA    the policy (a folder, or a name of the hub) and the data; see grpo.yaml
#   QREWARD_JOURNAL           where verdicts are recorded; default: qreward-RECIPE.sqlite in the current folder
#   QREWARD_RULES             the file of the rules; default: recipes/judges/rules.py
#   QREWARD_ENV               names of further variables that the run needs, e.g. WANDB_API_KEY
#   RAY_API_SERVER_ADDRESS    a running Ray cluster; default: verl starts a Ray on this machine

# Tracing, as in `bash -x`, would print keys.
set +x
set -euo pipefail

usage="usage: recipes/verl/run.sh grpo|ppo|grpo_colocated|grpo_sleeping [--dry-run [--offline]] [hydra overrides ...]"
recipe=${1:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipes=$(dirname "$here")
# shellcheck source=recipes/common.sh
source "$recipes/common.sh"
if [[ -z $recipe || $recipe == judges || ! -e $here/$recipe.yaml ]]; then
    echo "$usage" >&2
    exit 2
fi
judges=$here/judges.yaml
[[ $recipe != grpo_colocated && $recipe != grpo_sleeping ]] || judges=$recipes/judges/${recipe#grpo_}.yaml

export QREWARD_CONFIG=${QREWARD_CONFIG:-$judges}
export QREWARD_RULES=${QREWARD_RULES:-$recipes/judges/rules.py}
export QREWARD_JOURNAL=${QREWARD_JOURNAL:-$PWD/qreward-$recipe.sqlite}
make_absolute QREWARD_CONFIG QREWARD_RULES QREWARD_JOURNAL

take_dry_run "${@:2}"
set -- ${rest[@]+"${rest[@]}"}
if [[ -n $table ]]; then
    exec python3 "$recipes/dry_run.py" "${options[@]}" verl "$here" "$recipe" -- "$@"
fi

check_judges "$QREWARD_CONFIG"

train=(python3 -m verl.trainer.main_ppo --config-dir "$here" --config-name "$recipe" "$@")
if [[ -z ${RAY_API_SERVER_ADDRESS:-} ]]; then
    # verl starts a Ray, whose workers inherit this environment.
    exec "${train[@]}"
fi

# The processes of a Ray that runs already have the environment in which it was started, so the job brings the variables
# with it: those that the judges' file names and that are set, and those of this script.
carry_variables "$QREWARD_CONFIG"
variables=$(runtime_env '' QREWARD_CONFIG QREWARD_RULES QREWARD_JOURNAL MODEL TRAIN_DATA VAL_DATA PYTHONPATH)

# From standard input and not as --runtime-env-json: this command runs as long as the training does, and everybody on the
# machine can read its arguments.
exec ray job submit --address "$RAY_API_SERVER_ADDRESS" --runtime-env /dev/stdin -- "${train[@]}" <<<"$variables"
