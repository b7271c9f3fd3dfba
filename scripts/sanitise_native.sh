#!/usr/bin/env bash
# Run the tests of the native libraries under sanitisers: addresses and undefined behaviour together, then threads.
#
# Only the C code of chrion/native is instrumented; calls from Python and onnxruntime are ignored, since the sanitisers do not
# see how those synchronise. A sanitiser whose runtime the compiler lacks is named and skipped.
#
# Usage: scripts/sanitise_native.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
compiler=${CC:-cc}
tests=(tests/integration/test_{native,native_lifetime,lane_groups_in_use,affinity_changes,attention_operator,pooled_attention,silu_and_mul,hostile_operators,joined_products,recurrent_operator,bfloat16_operator,linear_operator,hostile_recurrent,native_kernels,native_calls}.py)

for tool in "$compiler" setarch; do
  command -v "$tool" >/dev/null || { echo "sanitisers: skipped, there is no $tool"; exit 0; }
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -r chrion tests models profiles pyproject.toml "$scratch"
cd "$scratch"

build() { # NAME SOURCES...: a library, with the flags of run
  # shellcheck disable=SC2086 # several flags
  "$compiler" -std=gnu11 -O1 -g -fno-omit-frame-pointer $flags -fPIC -fvisibility=hidden -shared -pthread "${@:2}" \
    -lm -o "chrion/native/lib$1.so"
}

run() { # NAME RUNTIME FLAGS: the tests with a library of such flags
  local name=$1 runtime flags=$3
  runtime=$("$compiler" -print-file-name="$2")
  if ! [ -e "$runtime" ]; then
    echo "$name: skipped, $compiler has no $2"
    return
  fi
  echo "$name:"
  build lanes chrion/native/lanes.c
  build operators $(printf '%s\n' chrion/native/*.c | grep -v /lanes.c)
  # The C++ library has to be loaded before the runtime looks for its functions; and the runtimes reserve large ranges of
  # addresses, which randomised mappings may collide with.
  setarch -R env LD_PRELOAD="$runtime $("$compiler" -print-file-name=libstdc++.so.6)" PYTHONPATH="$scratch" \
    ASAN_OPTIONS=detect_leaks=0:log_path="$scratch/report" \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path="$scratch/report" \
    TSAN_OPTIONS=ignore_noninstrumented_modules=1:log_path="$scratch/report" \
    "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" || failed=1
  if compgen -G "$scratch/report.*" >/dev/null; then # pytest captures what is written to stderr
    cat "$scratch"/report.*
    failed=1
  fi
}

failed=0
run "address and undefined behaviour" libasan.so "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
run "threads" libtsan.so -fsanitize=thread
exit $failed
