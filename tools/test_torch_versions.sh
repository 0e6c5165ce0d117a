#!/usr/bin/env bash
# Runs the tests on one torch after another, each in an environment of its own: .venv-torch-VERSION, made where it isn't there.
# It stands on .venv, which brings infinity and all else; only torch is installed, the CPU build where that is within reach.
# Prints what passed at the end, and fails if any did not.
#
#   tools/test_torch_versions.sh ["VERSION ..."] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/stacked_venv.sh

versions=(2.13.0 2.14.1 2.15.0)
[[ -z ${1:-} ]] || read -ra versions <<<"$1"
shift $(($# > 0))

make_venv() {
    local version=$1 venv=.venv-torch-$1
    echo "test_torch_versions: making $venv"
    make_stacked_venv "$venv"
    # --ignore-installed: a torch that is seen here already, in .venv or below that, doesn't count.
    local pip=("$venv/bin/python" -m pip install --quiet --no-compile --retries 1 --timeout 30)
    "${pip[@]}" --ignore-installed --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" \
        2>/dev/null || "${pip[@]}" --ignore-installed --no-deps "torch==$version"
    "${pip[@]}" "torch==$version" # what it depends on: of the CPU build, only what .venv doesn't have
    touch "$venv/.complete"
}

test_on() {
    local version=$1 venv=.venv-torch-$1
    shift
    [[ -e $venv/.complete ]] || make_venv "$version" || return
    "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.__version__.startswith(sys.argv[1]))' "$version" || {
        echo "test_torch_versions: $venv has another torch: remove it and run this again" >&2
        return 1
    }
    echo "=== torch $version"
    "$venv/bin/python" -m pytest --ignore tests/integrations -m "not long" "$@"
}

make --no-print-directory setup-test
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models are tiny, and tests run side by side
results=() status=0
for version in "${versions[@]}"; do
    # In a subshell with its own -e, which a function called in a condition would not heed.
    set +e
    (set -e && test_on "$version" "$@")
    code=$?
    set -e
    if ((code == 0)); then results+=("torch $version: passed"); else results+=("torch $version: FAILED") status=1; fi
done
echo
printf '=== %s\n' "${results[@]}"
exit $status
