#!/usr/bin/env bash
# Make the environment that ROLL needs, install this project into it, and run the tests of this folder there. ROLL's pins
# (requirements.txt says which, and why) fit no environment with current frameworks, so it has one of its own.
#
# Usage: QREWARD_ROLL_SRC=/path/to/ROLL tests/conformance/roll/environment.sh [pytest's arguments]
#   ROLL_VENV    where the environment is, or is to be; default: .venv-roll in the project
#   PYTHON       the interpreter that makes it, 3.10 or 3.11 (gem takes none later); default: python3
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../../.." && pwd)
folder=${ROLL_VENV:-$project/.venv-roll}
if [[ ! -f ${QREWARD_ROLL_SRC:?set it to a checkout of ROLL}/roll/pipeline/rlvr/rlvr_pipeline.py ]]; then
    echo "QREWARD_ROLL_SRC=$QREWARD_ROLL_SRC is not a checkout of ROLL" >&2
    exit 2
fi
python=${PYTHON:-python3}
if [[ ! -x $folder/bin/python ]]; then
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' || {
        echo "ROLL's environment needs Python 3.10 or 3.11; set PYTHON=python3.11" >&2
        exit 2
    }
fi

installed=$folder/.installed
if [[ $here/requirements.txt -nt $installed || $project/pyproject.toml -nt $installed || $here/environment.sh -nt $installed ]]; then
    install=("$python" "$project/scripts/environment.py" "$folder" --packages)
    # torch first and by its exact version: only so does pip take a build for the CPU where the machine offers one.
    "${install[@]}" "$(grep -o '^torch==[0-9.]*' "$here/requirements.txt")"
    "${install[@]}" --requirement "$here/requirements.txt" --editable "$project"
    # Without what it asks for: that is a parser for TeX whose antlr runtime is not the one that Hydra needs.
    "${install[@]}" --no-deps gem-llm==0.0.4
    touch "$installed"
fi
cd "$project"
exec "$folder/bin/python" -m pytest tests/conformance/roll "$@"
