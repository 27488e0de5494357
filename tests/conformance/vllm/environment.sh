#!/usr/bin/env bash
# Make an environment with vLLM for the CPU and llama.cpp, install this project into it, and run the tests of this folder there.
# vLLM's pins fit no environment with a training framework, so it has one of its own: about 3 GB, and two to seven minutes.
#
# Usage: tests/conformance/vllm/environment.sh [pytest's arguments]
#   VLLM_VENV    where the environment is, or is to be; default: .venv-vllm in the project
#   PYTHON       the interpreter that makes it, 3.11 or later; default: python3
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../../.." && pwd)
folder=${VLLM_VENV:-$project/.venv-vllm}
python=${PYTHON:-python3}
if [[ ! -x $folder/bin/python ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "this environment needs Python 3.11 or later; set PYTHON=python3.11" >&2
        exit 2
    }
    "$python" -m venv "$folder"
fi

installed=$folder/.installed
if [[ $here/requirements.txt -nt $installed || $project/pyproject.toml -nt $installed || $here/environment.sh -nt $installed ]]; then
    pip=("$folder/bin/pip")
    "${pip[@]}" install --quiet --disable-pip-version-check --requirement "$here/requirements.txt" --editable "$project[test]"
    # The index has torchvision for CUDA only, which fails when vLLM imports it, and triton takes 1 GB for nothing.
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec triton
    touch "$installed"
fi
cd "$project"
QREWARD_VLLM=1 exec "$folder/bin/python" -m pytest tests/conformance/vllm "$@"
