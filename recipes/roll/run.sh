#!/usr/bin/env bash
# RLVR on Qwen2.5-7B with ROLL: GRPO, or PPO with a critic, judged by the sources of judges.yaml. One node with eight
# GPUs of 80 GB.
#
# Usage: recipes/roll/run.sh grpo|ppo|NAME [--dry-run [--offline]]
#   NAME                      NAME.yaml beside this script: `defaults: [grpo, _self_]`, then keys of your own
#   --dry-run                 check everything, print one table, and start nothing; --offline: ask no judge either
#   ROLL_DIR                  a checkout of ROLL; default: the current directory
#   PRETRAIN, OUTPUT_DIR      model (a path, or a name on the hub) and folder of the results; see base.yaml
#   QREWARD_CONFIG            the judges; default: judges.yaml beside this script
#   QREWARD_RULES             the file of its rules; default: rules.py beside the judges, or else beside this script
#   QREWARD_JOURNAL           where verdicts are recorded; default: qreward-NAME.sqlite in the current folder
#   JUDGE_BASE_URL, HOSTED_BASE_URL, HOSTED_MODEL, HOSTED_API_KEY ...    the variables that QREWARD_CONFIG names
#   QREWARD_ENV               names of further variables that the run needs, e.g. WANDB_API_KEY
#   QREWARD_DRY_RUN=1         print what would be run, with all these variables masked, and stop
#   RAY_API_SERVER_ADDRESS    a running Ray cluster; default: ROLL starts one on this machine

# Tracing, as in `bash -x`, would print keys.
set +x
set -euo pipefail

usage="usage: recipes/roll/run.sh grpo|ppo|NAME [--dry-run [--offline]]"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=recipes/common.sh
source "$(dirname "$here")/common.sh"
take_dry_run "$@"
set -- ${rest[@]+"${rest[@]}"}
recipe=${1:-}
if (($# != 1)) || [[ $recipe == base || $recipe == judges || ! -e $here/$recipe.yaml ]]; then
    echo "$usage" >&2
    exit 2
fi

roll=${ROLL_DIR:-$PWD}
config=${QREWARD_CONFIG:-$here/judges.yaml}
rules=${QREWARD_RULES:-$(dirname "$config")/rules.py}
[[ -n ${QREWARD_RULES:-} || -e $rules ]] || rules=$here/rules.py
journal=${QREWARD_JOURNAL:-qreward-$recipe.sqlite}
dry_run=${QREWARD_DRY_RUN:-}
make_absolute roll config rules journal
export QREWARD_CONFIG=$config QREWARD_RULES=$rules QREWARD_JOURNAL=$journal PYTHONUNBUFFERED=1
export PYTHONPATH=$roll${PYTHONPATH:+:$PYTHONPATH}

# The recipe as ROLL composes it, unresolved; then a line of dashes and the paths that it needs. Relative paths start at
# ROLL's folder.
composed() {
    python3 -c '
import sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
folder, name = sys.argv[1:]
with initialize_config_dir(folder, version_base="1.3"):
    config = compose(name)
OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
print(OmegaConf.to_yaml(config), end="---\n")
for role in (config.actor_train, config.get("validation")):
    files = role.data_args.file_name if role else []
    print(*([files] if isinstance(files, str) else files), sep="\n")
if config.pretrain.startswith(("/", ".")):
    print(config.pretrain)
' "$here" "$recipe"
}

if [[ $table ]]; then
    exec python3 "$(dirname "$here")/dry_run.py" "${options[@]}" roll "$here" "$recipe" "$roll"
fi

start=$roll/examples/start_rlvr_pipeline.py
need ROLL_DIR "$start" "a checkout of ROLL"
need QREWARD_CONFIG "$config"
if told=$(composed 2>&1); then
    while read -r path; do
        [[ -z $path ]] || need "$recipe.yaml" "$([[ $path == /* ]] || echo "$roll/")$path"
    done <<<"${told##*$'\n---\n'}"
else
    missing+=("$recipe.yaml: ${told##*$'\n'}")
fi
carry_variables "$config"
if [[ ! $dry_run ]]; then
    command -v qreward >/dev/null || missing+=("qreward: not installed (pip install . beside ROLL)")
    if ! command -v ray >/dev/null; then
        missing+=("ray: not installed; run this where ROLL runs")
    elif [[ -z ${RAY_API_SERVER_ADDRESS:-} ]] && ray status >/dev/null 2>&1; then
        # Its workers have the environment in which it was started.
        missing+=("ray: one runs here already, and ROLL would use it without these variables. To hand them to it, set \
RAY_API_SERVER_ADDRESS (http://127.0.0.1:8265); to end it: ray stop")
    fi
fi
stop_if_missing

# Hydra takes the folder of the configuration relative to ROLL's script.
folder=$(python3 -c '
import os, sys
folder, script = map(os.path.realpath, sys.argv[1:])
print(os.path.relpath(folder, os.path.dirname(script)))
' "$here" "$start")
train=(env -C "$roll" python3 "$start" --config_path "$folder" --config_name "$recipe")

# For a Ray that runs.
job_env() {
    runtime_env "$1" PYTHONPATH PYTHONUNBUFFERED QREWARD_CONFIG QREWARD_RULES QREWARD_JOURNAL PRETRAIN OUTPUT_DIR
}

# From a file and not as --runtime-env-json: this command runs as long as the training does, and everybody on the
# machine can read its arguments.
submit=(ray job submit --address "${RAY_API_SERVER_ADDRESS:-}" --runtime-env /dev/stdin --)

if [[ $dry_run ]]; then
    printf '# configuration\n%s\n# environment\n%s\n# command\n' "${told%$'\n---\n'*}" "$(job_env mask)"
    printf '%q ' ${RAY_API_SERVER_ADDRESS:+"${submit[@]}"} "${train[@]}"
    echo
    exit
fi

check_judges "$config"

if [[ -n ${RAY_API_SERVER_ADDRESS:-} ]]; then
    "${submit[@]}" "${train[@]}" <<<"$(job_env '')"
else
    # ROLL starts a Ray, whose workers inherit this environment.
    exec "${train[@]}"
fi
