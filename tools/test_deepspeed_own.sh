#!/usr/bin/env bash
# Runs DeepSpeed's own tests of its I/O, unchanged, on infinity's handle, in .venv-deepspeed. They are not in its wheel:
#
#   git clone --branch v0.19.8 https://github.com/deepspeedai/DeepSpeed
#   tools/test_deepspeed_own.sh DeepSpeed [pytest arguments]
set -euo pipefail

checkout=${1:-}
if [[ ! -f $checkout/tests/unit/common.py ]]; then
    echo "usage: tools/test_deepspeed_own.sh CHECKOUT_OF_DEEPSPEED [pytest arguments]" >&2
    exit 2
fi
shift
checkout=$(cd "$checkout" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
[[ -e .venv-deepspeed/.complete ]] || tools/test_integration.sh deepspeed --collect-only --quiet

tests=()
for path in unit/ops/aio unit/v1/nvme/test_aio_gil.py unit/runtime/zero/test_nvme_checkpointing.py; do
    [[ -e $checkout/tests/$path ]] && tests+=("$path")
done
if ! .venv-deepspeed/bin/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    export DS_ACCELERATOR=cpu
fi
export DS_TEST_USE_INSTALLED_DEEPSPEED=1 # the installed package, not the checkout that holds its tests
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$root/.venv-deepspeed/extensions}
export PATH=$root/.venv-deepspeed/bin:$PATH PYTHONPATH=$root/tools/deepspeed_own${PYTHONPATH:+:$PYTHONPATH}
cd "$checkout/tests"
# Its own options leave out the tests that are to run one after the other, as these do.
exec "$root/.venv-deepspeed/bin/python" -m pytest -p infinity_handle -o addopts= "${tests[@]}" "$@"
