#!/usr/bin/env bash
# Build, GPU tests and benchmarks in one go, in under ten minutes, on a machine with torch and nothing else: no network needed.
#
#   bench/gpu_run.sh [--rehearse] [--wheels FOLDER] [--nvme-path FOLDER] [--out FOLDER] [--python PYTHON] [--seconds N]
#
# --wheels   wheels of what the machine may lack (pybind11, pydantic, rich, safetensors, pytest, ...): pip takes them, and nothing
#            from an index. Made beforehand, for the Python of the machine:
#            pip download -d FOLDER --python-version 3.12 --only-binary :all: pybind11 pydantic rich safetensors greenlet pytest ...
# --rehearse small sizes on the CPU; so it is anyway where there is no GPU.
# --out      gets results (JSON lines), the tests' log and what each part took (default: .gpu-run).
# Each part has a limit of its own, so that one that hangs doesn't take the others' time; the exit status is 0 when all went well.
set -u
cd "$(dirname "$0")/.."
python=python3 wheels= out=.gpu-run nvme=.nvme rehearse= budget=570
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearse) rehearse=1 ;;
    --wheels) wheels=$2; shift ;;
    --nvme-path) nvme=$2; shift ;;
    --out) out=$2; shift ;;
    --python) python=$2; shift ;;
    --seconds) budget=$2; shift ;;
    *) echo "gpu_run: unknown argument $1" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out" "$nvme"
out=$(cd "$out" && pwd) nvme=$(cd "$nvme" && pwd)
[ -z "$wheels" ] || wheels=$(cd "$wheels" && pwd) || exit 2
case "$python" in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
began=$SECONDS
failed=0
part() {  # part NAME LIMIT COMMAND...: runs it, says how it went
  local name=$1 limit=$2 left=$((budget - (SECONDS - began))) at=$SECONDS status
  shift 2
  if [ "$left" -le 5 ]; then echo "gpu_run: $name left out: the time is up" | tee -a "$out/summary.txt"; failed=1; return 1; fi
  [ "$limit" -gt "$left" ] && limit=$left
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "gpu_run: $name: exit $status after $((SECONDS - at)) s" | tee -a "$out/summary.txt"
  if [ $status -ne 0 ]; then failed=1; tail -n 15 "$out/$name.log"; fi
  return $status
}
: >"$out/summary.txt"

# The machine's own Python and torch are used as they are; missing packages go into a folder of this run.
export INFINITY_ANY_TORCH=1
export PYTHONPATH=$PWD:$out/site${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
  part wheels 90 bash -c '
    for each in setuptools pybind11 numpy pydantic rich safetensors greenlet pytest pytest-timeout:pytest_timeout hypothesis; do
      "$0" -c "import ${each#*:}" 2>/dev/null && continue
      "$0" -m pip install --quiet --no-index --find-links "$1" --target "$2" "${each%:*}" || echo "no wheel of ${each%:*}"
    done
    exec "$0" -c "import torch, pybind11, pydantic, rich, safetensors, greenlet, pytest"' "$python" "$wheels" "$out/site"
fi
if "$python" -c "import infinity._aio, infinity._optim" 2>/dev/null; then
  echo "gpu_run: infinity is built for $python already" | tee -a "$out/summary.txt"
else
  part build 240 "$python" setup.py build_ext --inplace || { echo "gpu_run: without the build nothing else can run"; exit 1; }
fi
"$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())" 2>/dev/null || rehearse=1
if [ -n "$rehearse" ]; then
  echo "gpu_run: rehearsed on the CPU: what follows says nothing about a GPU" | tee -a "$out/summary.txt"
  export INFINITY_REHEARSE_GPU=1 CUDA_VISIBLE_DEVICES=
  sizes=300k ways=device,nvme batch=2 context=32 bytes=8MiB
else
  sizes=1B,3B ways=device,host,nvme batch=8 context=1024 bytes=256MiB
fi
export INFINITY_TEST_PATH=$nvme
part tests 240 "$python" -m pytest -q -rs --timeout 200 -m "not slow" -p no:cacheprovider tests/gpu tests/device/test_staging.py
part copies 60 "$python" bench/copies.py --bytes "$bytes"
part step 330 "$python" bench/gpu_step.py --params "$sizes" --ways "$ways" --batch-sizes "$batch" --context "$context" \
  --first-steps 1 --steps 1 --nvme-path "$nvme" --timeout-seconds 150
for name in copies step; do
  if [ -f "$out/$name.log" ]; then grep '^{' "$out/$name.log" >"$out/$name.jsonl"; fi
done
echo "gpu_run: $((SECONDS - began)) s in all; see $out" | tee -a "$out/summary.txt"
exit $failed
