# shellcheck shell=bash
# What the run.sh of all recipes share. It is sourced: it defines functions, and starts nothing.
#
# It needs `usage`, one line, and `here`, the absolute folder of the run.sh.

script=recipes/${here##*/}/run.sh

# Takes --dry-run and --offline out of the arguments, wherever they are: a dry run that is asked for too late must not
# become a training. Sets `table` (1 for a dry run), `options` (those of dry_run.py) and `rest`, the other arguments.
take_dry_run() {
    table=
    options=()
    rest=()
    local argument
    for argument in "$@"; do
        case $argument in
            --dry-run) table=1 ;;
            --offline) options=(--offline) ;;
            *) rest+=("$argument") ;;
        esac
    done
    if [[ -z $table && ${#options[@]} -gt 0 ]]; then
        echo "--offline needs --dry-run; $usage" >&2
        exit 2
    fi
}

# Makes the paths in these variables absolute. Ray's processes have other current directories.
make_absolute() {
    local variable
    for variable in "$@"; do
        [[ ${!variable} == /* ]] || printf -v "$variable" %s "$PWD/${!variable}"
    done
}

# What is missing is reported at once, because each start of a run takes minutes: need, carry_variables and other
# checks add a line to `missing`, and stop_if_missing ends the script.
missing=()
need() { [[ -e ${2%@[*} ]] || missing+=("$1: $2 does not exist${3:+ ($3)}"); }

stop_if_missing() {
    ((${#missing[@]})) || return 0
    echo "$script: cannot start:" >&2
    printf '  %s\n' "${missing[@]}" >&2
    exit 2
}

# Sets `carried` to the names of the variables that a judges' file reads and that are set, and adds a line to `missing`
# for each that is not set and has no default. QREWARD_ENV names more. HOME is that of each machine.
carried=()
carry_variables() {
    [[ -e $1 ]] || return 0
    local named name variable
    # A comma follows those with a default.
    named=$(sed 's/#.*//' "$1" | grep -oE 'oc\.env:\w+,?|api_key_env:\s*"?\w+' | sed -E 's/^.*[^[:alnum:]_,]//' | sort -u || true)
    for name in $named ${QREWARD_ENV:-}; do
        variable=${name%,}
        if [[ $variable == HOME ]]; then
            continue
        elif [[ -n ${!variable:-} ]]; then
            carried+=("$variable")
        elif [[ $variable == "$name" ]]; then
            missing+=("$variable: not set")
        fi
    done
}

# Prints the environment of every process of a Ray job, as JSON: the variables in `carried`, and those that the
# arguments name (NAME, if it is set, or NAME=VALUE). `runtime_env mask ...` masks all of `carried`: which of it is a
# secret is for nobody to guess.
runtime_env() {
    python3 -c '
import json, os, sys
mask, count, *names = sys.argv[1:]
carried, fixed = names[:int(count)], names[int(count):]
variables = {name: "***" if mask else os.environ[name] for name in carried}
for name, given, value in (text.partition("=") for text in fixed):
    if given or name in os.environ:
        variables[name] = value if given else os.environ[name]
print(json.dumps({"env_vars": variables}))
' "$1" "${#carried[@]}" "${carried[@]}" "${@:2}"
}

# Checks the judges: their mistakes should cost seconds here rather than minutes of start-up. A judge that the trainer
# serves itself cannot be asked before.
check_judges() {
    [[ $(sed 's/#.*//' "$1") == *framework://* ]] || qreward check "$1"
}
