#!/usr/bin/env bash
# bench/gpu.sh OUTDIR [CASES]: check and measure this checkout on a GPU machine, in under nine minutes.
#
# CASES, a pytest -k expression such as "lra or long_2048", measures those cases alone and leaves out
# tests/gpu and the steps: nine minutes reach about a third of the cases, the next nine another.
# "language or cross_entropy or nystrom" are the language rows, "adapter" transformers' and timm's
# models under our attention. "listops_seeds" measures nothing and trains the two ListOps rows in full,
# five seeds each, into folders of OUTDIR: that takes longer, so run it again with the same OUTDIR until
# both have passed; no seed starts over.
# Needs no network and no install: python3 on PATH with torch, triton, pytest, pytest-benchmark and hypothesis.
# Most valuable first, each stage with its own limit, so that time running out costs the least:
#   native library, one shape of each operator end to end, one step of every row of the paper,
#   tests/gpu, compute-sanitizer where it is installed (the native library, and every Triton kernel on a
#   few small shapes), the benchmarks with what each peer keeps in memory, with condition numbers and
#   with models, and at last what is slow to compile: FlexAttention and everything through torch.compile.
# Writes eight files at most into OUTDIR; summary.txt is also printed last.
# Exits 0 when everything that ran passed, 1 when something failed or was stopped, 2 when it cannot
# start.
set -u

refuse() {
  echo "bench/gpu.sh: $*" >&2
  exit 2
}

[ $# -eq 1 ] || [ $# -eq 2 ] || refuse "give the folder to write into: bench/gpu.sh OUTDIR [CASES]"
cases=${2:+"($2) and "}
mkdir -p "$1" || refuse "cannot create $1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
command -v python3 >/dev/null || refuse "python3 is not on PATH"

python3 - <<'PYTHON' || exit 2
import importlib.util
import sys

needed = ("torch", "triton", "pytest", "pytest_benchmark", "hypothesis")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"bench/gpu.sh: missing from {sys.executable}: {', '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"bench/gpu.sh: torch {torch.__version__} sees no CUDA GPU: nothing to measure")
PYTHON

total=510       # seconds until the last stage must end; the summary needs some of nine minutes too
largest=8000000 # bytes that are kept of one log
failed=0
summary=$out/summary.txt
for name in environment.txt tests.log bench.log {compatibility,steps,bench,compiled}.json; do
  rm -f "$out/$name"
done
: >"$summary"

# stage NAME SECONDS LOG COMMAND...: run with a limit, append to LOG, note how it ended.
# With may_be_empty=yes a pytest that selects nothing is no failure.
stage() {
  local name=$1 limit=$2 log=$out/$3 began=$SECONDS status left
  shift 3
  left=$((total - SECONDS))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not run, no time left" | tee -a "$summary"
    return
  fi
  echo "== $name (at most $limit s)"
  # An interrupt lets pytest save what it has.
  timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$log" 2>&1
  status=$?
  if [ "$status ${may_be_empty:-no}" = "5 yes" ]; then
    echo "$name: none of the cases asked for" | tee -a "$summary"
    return
  fi
  case $status in
    0) echo "$name: passed in $((SECONDS - began)) s" ;;
    124 | 137) echo "$name: STOPPED after $((SECONDS - began)) s" ;;
    *) echo "$name: FAILED with status $status after $((SECONDS - began)) s, see ${log##*/}" ;;
  esac | tee -a "$summary"
  [ $status -eq 0 ] || failed=1
  if [ "$(wc -c <"$log")" -gt $largest ]; then
    tail -c $largest "$log" >"$log.tail" && mv "$log.tail" "$log"
  fi
}

# pytest NAME SECONDS LOG ARGUMENTS...
pytest() {
  local name=$1 limit=$2 log=$3
  shift 3
  stage "$name" "$limit" "$log" python3 -m pytest -p no:cacheprovider "$@"
}

{
  date -u
  python3 -m bench.machine
  timeout 30 nvidia-smi
  python3 -m pip list 2>/dev/null
} >"$out/environment.txt" 2>&1

if [ "${2:-}" = listops_seeds ]; then
  # What is stopped keeps its checkpoint, and a seed that is finished is not trained again.
  for model in nystromformer_listops_lean nystromformer_listops; do
    stage "$model, five seeds" $total listops.log python3 train/lra.py --task listops \
      --model $model --seeds 5 --resume auto --out "$out/$model" --cache "$out/data"
  done
  echo
  cat "$summary"
  exit $failed
fi

export PATH=$PATH:/usr/local/cuda/bin
if ! compgen -G 'leaner_kernels/csrc/*.cu' >/dev/null; then
  echo "native library: nothing to build, leaner_kernels/csrc holds no .cu file" | tee -a "$summary"
elif ! command -v cmake >/dev/null || ! command -v nvcc >/dev/null; then
  echo "native library: not built, cmake or nvcc is not on PATH" | tee -a "$summary"
else
  stage "native library" 90 tests.log sh -c \
    'cmake -S . -B build/native && cmake --build build/native -j && cmake --install build/native'
fi

# The gate of one shape: compiles the kernels, runs them and compares with float64.
one=vit_base-both-eager-leaner
for case in xcit_m volo_d3_outlook davit_channel3 davit_window3 nystrom_listops \
  adapter_gpt2 adapter_vit; do
  one="$one or $case-both-eager-leaner"
done
pytest "one shape of each" 110 tests.log bench --benchmark-disable -k "$one"
# What every row takes of the GPU, before anything is timed.
if [ -n "$cases" ]; then
  echo "one step of every row: left out, only some cases were asked for" | tee -a "$summary"
else
  pytest "one step of every row" 140 bench.log bench/bench_models.py bench/bench_language.py \
    --benchmark-only --bench-seconds=120 --benchmark-json="$out/steps.json" -k "one_step and not cpu_"
fi
# Most of that time is compiling, which several processes share where pytest-xdist is installed.
workers=()
if python3 -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi
if [ -n "$cases" ]; then
  echo "tests/gpu: left out, only some cases were asked for" | tee -a "$summary"
elif compgen -G 'tests/gpu/test_*.py' >/dev/null; then
  # A file that cannot be imported here fails alone; the log says what was skipped, and why.
  pytest "tests/gpu" 140 tests.log tests/gpu ${workers[@]+"${workers[@]}"} -rs \
    --durations=15 --continue-on-collection-errors --compat-results="$out/compatibility.json"
else
  echo "tests/gpu: not run, it holds no tests" | tee -a "$summary"
fi
native=tests/gpu/test_native_kappa.py guards=tests/gpu/test_guard_pages_gpu.py
# sanitize NAME SECONDS TOOL TESTS
sanitize() {
  [ -e "$4" ] || return 0
  # Memory that PyTorch caches hides an access past the end of a tensor.
  local caching=()
  if [ "$3" = memcheck ]; then caching=(PYTORCH_NO_CUDA_MEMORY_CACHING=1); fi
  stage "compute-sanitizer $1" "$2" tests.log compute-sanitizer --tool "$3" --error-exitcode 9 \
    env ${caching[@]+"${caching[@]}"} python3 -m pytest -p no:cacheprovider "$4"
}
if [ -n "$cases" ] || { [ ! -e $native ] && [ ! -e $guards ]; }; then
  : # nothing that it should check
elif ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer: not run, it is not on PATH" | tee -a "$summary"
else
  for tool in memcheck racecheck synccheck; do
    sanitize $tool 40 $tool $native
  done
  # What tests/gpu compiled is in Triton's cache. Their barriers are the compiler's: no racecheck.
  sanitize "memcheck, Triton kernels" 60 memcheck $guards
fi
# Less time for starting benchmarks than for the stage: the kernels' names are asked for at the end.
left=$((total - SECONDS - 110))
pytest "benchmarks" $((left + 60)) bench.log bench --benchmark-only --bench-seconds="$left" \
  --benchmark-json="$out/bench.json" \
  -k "${cases}not cpu_ and not one_step and not flex and not compiled"
left=$((total - SECONDS - 30))
may_be_empty=${2:+yes} \
  pytest "compiled" $((left + 30)) bench.log bench --benchmark-only --bench-seconds="$left" \
  --benchmark-json="$out/compiled.json" \
  -k "${cases}not cpu_ and not one_step and (flex or compiled)"

results=()
for name in steps bench compiled; do
  [ ! -s "$out/$name.json" ] || results+=("$out/$name.json")
done
# Of models of others, what the tests and the benchmarks found.
found=(${results[@]+"${results[@]}"})
[ ! -s "$out/compatibility.json" ] || found+=("$out/compatibility.json")
if [ ${#found[@]} -gt 0 ]; then
  python3 -m bench.compatibility --short "${found[@]}" >>"$summary" 2>&1 || failed=1
fi
if [ ${#results[@]} -gt 0 ]; then
  python3 -m bench.report --short "${results[@]}" >>"$summary" 2>&1 || failed=1
fi
echo
cat "$summary"
exit $failed
