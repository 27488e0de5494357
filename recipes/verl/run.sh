#!/usr/bin/env bash
# Usage: recipes/verl/run.sh grpo|ppo [hydra overrides ...]
#   QREWARD_CONFIG    the judges; default: judges.yaml beside this script
#   HOSTED_BASE_URL, HOSTED_MODEL, HOSTED_API_KEY    the hosted source of that file
set -euo pipefail

recipe=${1:?usage: recipes/verl/run.sh grpo|ppo [hydra overrides ...]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export QREWARD_CONFIG=${QREWARD_CONFIG:-$here/judges.yaml}

# Mistakes in the judges' configuration should cost a second here rather than minutes of start-up.
qreward check "$QREWARD_CONFIG"
exec python -m verl.trainer.main_ppo --config-dir "$here" --config-name "$recipe" "$@"
