#!/usr/bin/env bash
# Tests one integration in an environment of its own: .venv-NAME, made where it isn't there, with the newest versions that
# pyproject.toml allows. The extension is the one that `make setup` has built.
#
#   tools/test_integration.sh deepspeed|transformers|lightning [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-}
case $name in
    deepspeed | transformers | lightning) shift ;;
    *)
        echo "usage: tools/test_integration.sh deepspeed|transformers|lightning [pytest arguments]" >&2
        exit 2
        ;;
esac

python=.venv-$name/bin/python
make --no-print-directory setup
if [[ ! -e .venv-$name/.complete ]]; then
    rm -rf ".venv-$name"
    .venv/bin/python -m venv ".venv-$name"
    # The same build of torch as .venv's; `+cpu` is a build that only its own index, or a wheel at hand, has.
    torch=$(.venv/bin/python -c 'import importlib.metadata; print(importlib.metadata.version("torch"))')
    index=()
    [[ $torch == *+cpu ]] && index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    "$python" -m pip install --quiet "${index[@]}" "torch==$torch" "setuptools>=77" "pybind11>=2.13"
    "$python" -m pip install --quiet pytest pytest-timeout hypothesis
    "$python" -m pip install --quiet --no-build-isolation --editable ".[$name]"
    touch ".venv-$name/.complete"
fi
if [[ $name == deepspeed ]]; then
    export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.venv-$name/extensions}
    export PATH=$PWD/.venv-$name/bin:$PATH # ninja, with which DeepSpeed compiles, and its commands
fi
exec "$python" -m pytest "tests/integrations/test_$name.py" "$@"
