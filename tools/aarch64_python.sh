#!/usr/bin/env bash
# Make DIR/bin/python: a Python for aarch64 with torch, which qemu runs on a machine with another CPU. Only Python is
# emulated: the compilers that it starts are this machine's. Needs Debian 12, g++-aarch64-linux-gnu, qemu-user and
# mmdebstrap, and pip. Takes 5 minutes, 0.5 GB from package registries, and 2 GB of disk.
#
#     tools/aarch64_python.sh DIR
#     tools/build_wheels.py --emulated DIR/bin/python                           # a wheel for aarch64
#     INFINITY_AARCH64=DIR make test-long ARGS="tests/test_aarch64_wheel.py"    # makes one, and uses it
#
# QEMU_CPU is the CPU: by default one with SVE of 128 bits, as in Grace and GB10; neoverse-n1 has none.
set -euo pipefail
[ $# = 1 ] || { echo "usage: tools/aarch64_python.sh DIR" >&2; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
root=$folder/root
site=$folder/lib/python3.11/site-packages
mkdir -p "$folder/bin" "$site"

mmdebstrap --quiet --variant=extract --architectures=arm64 \
    --include=python3,libpython3-dev,libc6-dev,libstdc++6,liburing-dev bookworm "$root"

options=(--quiet --no-cache-dir --only-binary=:all: --python-version 3.11 --target "$site")
for glibc in 2_28 2_27 2_24 2_17; do options+=(--platform "manylinux_${glibc}_aarch64"); done
python3 -m pip install "${options[@]}" --no-deps torch==2.13.0 "nvidia-cuda-runtime==13.0.*"
python3 -m pip install "${options[@]}" --upgrade filelock fsspec jinja2 networkx sympy typing-extensions greenlet numpy \
    "pydantic>=2.6,<3" rich safetensors pip "setuptools>=77" "pybind11>=2.13" wheel pytest pytest-timeout hypothesis

# This torch is built for CUDA. Its libraries take 3 GB and have nothing to do without a GPU: these have their names.
cd "$site/torch/lib"
aarch64-linux-gnu-nm -D --undefined-only lib*.so* | sed -nE 's/^ +U ((cu|nccl|nv)[A-Za-z0-9_]+).*/\1/p' |
    grep -vE '^(cuda|nvpl)' | sort -u | sed 's/.*/.globl &\n&:/' >"$folder/cuda.s"
echo brk 0 >>"$folder/cuda.s"
echo 'NVSHMEM { *; };' >"$folder/nvshmem"
for name in libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0 libcupti.so.13 libcurand.so.10 \
    libcusolver.so.12 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2 libnvrtc.so.13 libnvshmem_host.so.3; do
    version=--default-symver
    [ $name != libnvshmem_host.so.3 ] || version=--version-script=$folder/nvshmem
    aarch64-linux-gnu-gcc -shared -nostdlib "-Wl,$version,-soname,$name" -o $name "$folder/cuda.s"
done

# torch looks into /proc/cpuinfo for the CPU, which qemu leaves as it is.
mkdir -p "$root/proc"
for number in 0 1; do
    printf 'processor\t: %d\nFeatures\t: fp asimd aes crc32 atomics\n' $number
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
done >"$root/proc/cpuinfo"

echo "home = $root/usr/bin" >"$folder/pyvenv.cfg"
cat >"$folder/bin/python" <<END
#!/bin/sh
flags="--sysroot=$root -I$root/usr/include/python3.11"
export CC="aarch64-linux-gnu-gcc \$flags" CXX="aarch64-linux-gnu-g++ \$flags"
exec qemu-aarch64 -cpu "\${QEMU_CPU:-max,sve128=on,sve256=off}" -L $root -0 $folder/bin/python $root/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/bin/python"
"$folder/bin/python" -c "import platform, torch; print(platform.machine(), torch.__version__)"
