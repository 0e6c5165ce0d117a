#!/usr/bin/env bash
# Tests one integration in an environment of its own: .venv-NAME, made where it isn't there, with the newest versions that
# pyproject.toml allows. It stands on .venv, which brings infinity, torch and pytest; only what NAME needs is installed.
#
#   tools/test_integration.sh deepspeed|transformers|peft|accelerate|trl|lightning [pytest arguments]
#
# peft is what stands on transformers: adapters, quantised and split models, bitsandbytes. Its environment is transformers', and
# so is that of accelerate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/stacked_venv.sh

name=${1:-}
case $name in
    deepspeed | transformers | trl | lightning) tests=("tests/integrations/test_$name"*.py) ;;
    peft)
        tests=(tests/integrations/test_{adapters,mixtures,planned_models,published,quantised,bitsandbytes}.py)
        name=transformers
        ;;
    accelerate)
        tests=(tests/integrations/test_accelerate.py)
        name=transformers
        ;;
    *)
        echo "usage: tools/test_integration.sh deepspeed|transformers|peft|accelerate|trl|lightning [pytest arguments]" >&2
        exit 2
        ;;
esac
shift

make_venv() {
    echo "test_integration: making .venv-$name: $name, on top of .venv"
    make_stacked_venv ".venv-$name"
    # `+cpu` is a build of torch that only its own index, or a wheel at hand, has; the one of .venv has to stay.
    local torch
    torch=$(.venv/bin/python -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')
    echo "torch==$torch" >".venv-$name/constraints.txt"
    local wanted
    local extras=$name
    [[ $name != transformers ]] || extras="transformers|peft|quantised"
    mapfile -t wanted < <("$python" - "$extras" <<'PYTHON'
import importlib.metadata, re, sys
for line in importlib.metadata.requires("infinity-offload"):
    requirement, _, condition = line.partition(";")
    if re.search(rf"extra == .({sys.argv[1]}).$", condition.strip()):
        print(requirement.strip())
PYTHON
)
    [[ $name != transformers ]] || wanted+=("compressed-tensors>=0.15") # whose values tests compare with; nothing else needs it
    # An index that doesn't answer is a failure, and soon.
    "$python" -m pip install --quiet --no-compile --no-build-isolation --retries 1 --timeout 30 \
        --constraint ".venv-$name/constraints.txt" "${wanted[@]}"
    touch ".venv-$name/.complete"
}

python=.venv-$name/bin/python
export PYTHONDONTWRITEBYTECODE= # compile modules once, at their first import
make --no-print-directory setup-test
[[ -e .venv-$name/.complete ]] || make_venv
if [[ ! -e .venv-$name/bin/torchrun ]]; then # that of .venv starts .venv's Python
    printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$PWD/$python" >".venv-$name/bin/torchrun"
    chmod +x ".venv-$name/bin/torchrun"
fi
if [[ $name == deepspeed ]]; then
    export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.venv-$name/extensions}
    rm -f "$PWD/.venv-$name/extensions"/*/lock # of a build that was killed: torch would wait for it for ever
    export PATH=$PWD/.venv-$name/bin:$PATH # ninja, with which DeepSpeed compiles, and its commands
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models are tiny, and other jobs may run at the same time
exec "$python" -m pytest "${tests[@]}" "$@"
