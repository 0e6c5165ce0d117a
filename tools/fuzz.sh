#!/usr/bin/env bash
# Coverage-guided fuzzing of the C++ core, each program for SECONDS (default 60): clang's libFuzzer under AddressSanitizer and
# UBSan. An input that fails is kept as build/fuzz/crash-*; run the program with that file as its argument to see it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-60}
command -v clang++ >/dev/null || { echo "fuzz: error: clang++ is missing (Debian: apt-get install clang)" >&2; exit 1; }
mkdir -p build/fuzz
uring=()
if echo '#include <liburing.h>' | clang++ -x c++ -fsyntax-only - 2>/dev/null; then uring=(-DINFINITY_HAVE_LIBURING -luring); fi
sources=()
for source in csrc/{base,aio}/*.cpp tests/csrc/faulty/*.cpp; do [[ $source == */bindings.cpp ]] || sources+=("$source"); done
for program in engine volume; do
    mkdir -p "build/fuzz/corpus-$program"
    clang++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -DDOCTEST_CONFIG_DISABLE \
        -Icsrc "-DINFINITY_FUZZ=fuzz_$program" "${sources[@]}" "tests/csrc/fuzz/fuzz_$program.cpp" \
        tests/csrc/fuzz/entry.cpp -pthread "${uring[@]}" -o "build/fuzz/$program"
    echo "=== fuzz_$program, $seconds s"
    "build/fuzz/$program" -max_total_time="$seconds" -max_len=512 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix=build/fuzz/ "build/fuzz/corpus-$program" >"build/fuzz/$program.log" 2>&1 && failed=0 || failed=$?
    grep -E "DONE|^stat::(number|average)|^==|^not so|^SUMMARY" "build/fuzz/$program.log" || true
    if ((failed)); then
        echo "fuzz: fuzz_$program failed; all it said is in build/fuzz/$program.log" >&2
        exit 1
    fi
done
