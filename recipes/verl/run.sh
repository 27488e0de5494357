#!/usr/bin/env bash
# GRPO, or PPO with a critic, with verl, judged by the sources of a YAML file.
#
# Usage: recipes/verl/run.sh grpo|ppo|grpo_colocated [--dry-run [--offline]] [hydra overrides ...]
#   --dry-run                 check everything, print one table, and start nothing; --offline: ask no judge either
#   QREWARD_CONFIG            the judges; default: judges.yaml beside this script, for grpo_colocated
#                             recipes/judges/colocated.yaml
#   HOSTED_BASE_URL, HOSTED_MODEL, HOSTED_API_KEY ...    the variables that this file names
#   MODEL, TRAIN_DATA, VAL_DATA    the policy (a folder, or a name of the hub) and the data; see grpo.yaml
#   QREWARD_JOURNAL           where verdicts are recorded; default: qreward-RECIPE.sqlite in the current folder
#   QREWARD_RULES             the file of the rules; default: recipes/judges/rules.py
#   QREWARD_ENV               names of further variables that the run needs, e.g. WANDB_API_KEY
#   RAY_API_SERVER_ADDRESS    a running Ray cluster; default: verl starts a Ray on this machine

# Tracing, as in `bash -x`, would print keys.
set +x
set -euo pipefail

usage="usage: recipes/verl/run.sh grpo|ppo|grpo_colocated [--dry-run [--offline]] [hydra overrides ...]"
recipe=${1:?$usage}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipes=$(dirname "$here")
if [[ $recipe == judges || ! -e $here/$recipe.yaml ]]; then
    echo "$usage" >&2
    exit 2
fi
judges=$here/judges.yaml
[[ $recipe != grpo_colocated ]] || judges=$recipes/judges/colocated.yaml

export QREWARD_CONFIG=${QREWARD_CONFIG:-$judges}
export QREWARD_RULES=${QREWARD_RULES:-$recipes/judges/rules.py}
export QREWARD_JOURNAL=${QREWARD_JOURNAL:-$PWD/qreward-$recipe.sqlite}
# Ray's processes have other current directories.
for name in QREWARD_CONFIG QREWARD_RULES QREWARD_JOURNAL; do
    [[ ${!name} == /* ]] || printf -v "$name" %s "$PWD/${!name}"
done

# Anywhere among the arguments: a dry run that is asked for too late must not become a training.
table=
options=()
rest=()
for argument in "$@"; do
    case $argument in
        --dry-run) table=1 ;;
        --offline) options=(--offline) ;;
        *) rest+=("$argument") ;;
    esac
done
set -- ${rest[@]+"${rest[@]}"}
if [[ -z $table && ${#options[@]} -gt 0 ]]; then
    echo "--offline needs --dry-run; $usage" >&2
    exit 2
fi
if [[ -n $table ]]; then
    exec python3 "$recipes/dry_run.py" "${options[@]}" verl "$here" "$recipe" -- "$@"
fi

# Mistakes in the judges' configuration should cost a second here rather than minutes of start-up. A judge that verl
# serves itself cannot be asked before.
if ! grep -v '^ *#' "$QREWARD_CONFIG" | grep -q 'framework://'; then
    qreward check "$QREWARD_CONFIG"
fi

train=(python3 -m verl.trainer.main_ppo --config-dir "$here" --config-name "$recipe" "$@")
if [[ -z ${RAY_API_SERVER_ADDRESS:-} ]]; then
    # verl starts a Ray, whose workers inherit this environment.
    exec "${train[@]}"
fi

# The processes of a Ray that runs already have the environment in which it was started, so the job brings the variables
# with it: those that the judges' file names and that are set, and those of this script.
runtime_env() {
    python3 -c '
import json, os, re, sys
text = re.sub(r"#.*", "", open(os.environ["QREWARD_CONFIG"]).read())
named = re.findall(r"oc\.env:(\w+)|api_key_env:\s*\"?(\w+)", text)
own = ("QREWARD_CONFIG", "QREWARD_RULES", "QREWARD_JOURNAL", "MODEL", "TRAIN_DATA", "VAL_DATA", "PYTHONPATH")
names = {*own, *os.environ.get("QREWARD_ENV", "").split(), *(name for pair in named for name in pair)} - {"", "HOME"}
print(json.dumps({"env_vars": {name: os.environ[name] for name in sorted(names) if name in os.environ}}))
'
}

# From standard input and not as --runtime-env-json: this command runs as long as the training does, and everybody on the
# machine can read its arguments.
exec ray job submit --address "$RAY_API_SERVER_ADDRESS" --runtime-env /dev/stdin -- "${train[@]}" <<<"$(runtime_env)"
