#!/usr/bin/env bash
# bench/gpu.sh OUTDIR STAGE [-k EXPRESSION]: check and measure this checkout on a GPU machine, in stages
# that each end within nine minutes and name the next one, most telling first:
#
#   first      the native library; one shape of each operator, end to end; one step of every row of the paper
#   attention  tests/gpu of softmax attention, and of models of transformers and timm on it
#   operators  the rest of tests/gpu: other operators, transforms, fuzzing, torch.compile, training
#   memory     tensors of more than 2**31 elements, one test at a time, then compute-sanitizer: the native
#              library, and every Triton kernel on a few small shapes
#   bench      operators and condition numbers, timed
#   models     models, steps and losses, timed; what each peer keeps in memory
#   compiled   what is slow to compile: FlexAttention and everything through torch.compile
#
# EXPRESSION, pytest's, narrows a stage: "bench -k 'lra or long_2048'", "models -k adapter". Nine minutes
# time about a third of the cases of bench; what was not reached is recorded.
# A stage of its own, "listops_seeds", trains the two ListOps rows in full, five seeds each, into folders
# of OUTDIR: that takes longer, so run it again with the same OUTDIR until both have passed; no seed
# starts over.
# Needs no network and no install: python3 on PATH with torch, triton, pytest, pytest-benchmark and hypothesis;
# with pandas and tabulate the summary ends with tables of what was measured.
# OUTDIR gathers stages: each writes STAGE.txt, STAGE.log and, of what it timed, STAGE.json (with -k named
# after that too), and summary.txt anew from all that lie there, which is also printed last.
# Exits 0 when everything that ran passed, 1 when something failed or was stopped, 2 when it cannot
# start.
set -u

stages=(first attention operators memory bench models compiled)

refuse() {
  echo "bench/gpu.sh: $*" >&2
  exit 2
}

usage="bench/gpu.sh OUTDIR STAGE [-k EXPRESSION]"
[ $# -eq 2 ] || { [ $# -eq 4 ] && [ "$3" = -k ]; } ||
  refuse "give the folder to write into and a stage (${stages[*]}): $usage"
stage=$2 narrow=${4:-}
case " ${stages[*]} listops_seeds " in
  *" $stage "*) ;;
  *) refuse "no stage is named $stage, one of ${stages[*]} listops_seeds: $usage" ;;
esac
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

total=510       # seconds until the last part must end; the summary needs some of nine minutes too
largest=8000000 # bytes that are kept of one log
failed=0
run=$stage${narrow:+-${narrow//[^A-Za-z0-9]/-}}
run=${run:0:60}
found=$out/$run.txt log=$out/$run.log
rm -f "$log" "$out/$run.json"
: >"$found"

# part NAME SECONDS COMMAND...: run with a limit, append to the log, note how it ended.
# A pytest that selects nothing is no failure where -k narrows.
part() {
  local name=$1 limit=$2 began=$SECONDS status left
  shift 2
  left=$((total - SECONDS))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: not run, no time left" | tee -a "$found"
    return
  fi
  echo "== $name (at most $limit s)"
  # An interrupt lets pytest save what it has.
  timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$log" 2>&1
  status=$?
  if [ "$status${narrow:+ narrow}" = "5 narrow" ]; then
    echo "$name: none of the cases selected" | tee -a "$found"
    return
  fi
  case $status in
    0) echo "$name: passed in $((SECONDS - began)) s" ;;
    124 | 137) echo "$name: STOPPED after $((SECONDS - began)) s" ;;
    *) echo "$name: FAILED with status $status after $((SECONDS - began)) s, see ${log##*/}" ;;
  esac | tee -a "$found"
  [ $status -eq 0 ] || failed=1
  if [ "$(wc -c <"$log")" -gt $largest ]; then
    tail -c $largest "$log" >"$log.tail" && mv "$log.tail" "$log"
  fi
}

# pytest NAME SECONDS SELECTION ARGUMENTS...: SELECTION is an expression or empty.
pytest() {
  local name=$1 limit=$2 selection=$3
  shift 3
  if [ -n "$narrow" ]; then selection="($narrow)${selection:+ and ($selection)}"; fi
  part "$name" "$limit" python3 -m pytest -p no:cacheprovider "$@" ${selection:+-k "$selection"}
}

# Most of the time of tests is compiling, which processes share where pytest-xdist is installed. About
# 1,500 specialisations at 0.2 to 1.3 s (an estimate; with Triton 3.6 a C compiler besides for each new
# signature) are 1.9 a test. Tests collected, and the estimate for 8 processes:
#   attention 340: 16 to 105 s of compiling; operators 410: 20 to 125 s, and Inductor's 50 graphs at 5 to
#   20 s; each besides 1 to 2 minutes of starting, of references in float64 and of processes that compile
#   the same. memory: 27 tests at 3 to 15 s, one after the other.
parallel() {
  local workers=$(($(nproc) / 2)) many=()
  [ "$workers" -ge 1 ] || workers=1
  [ "$workers" -le 8 ] || workers=8
  if python3 -c 'import xdist' 2>/dev/null; then many=(-n "$workers"); fi
  # A file that cannot be imported here fails alone; the log has what was skipped, and why.
  OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 pytest "$@" ${many[@]+"${many[@]}"} -rs \
    --durations=15 --continue-on-collection-errors
}

native_library() {
  if ! compgen -G 'leaner_kernels/csrc/*.cu' >/dev/null; then
    echo "native library: nothing to build, leaner_kernels/csrc holds no .cu file" | tee -a "$found"
  elif ! command -v cmake >/dev/null || ! command -v nvcc >/dev/null; then
    echo "native library: not built, cmake or nvcc is not on PATH" | tee -a "$found"
  else
    part "native library" 120 sh -c \
      'cmake -S . -B build/native && cmake --build build/native -j && cmake --install build/native'
  fi
}

# sanitize NAME SECONDS TOOL TESTS
sanitize() {
  # Memory that PyTorch caches hides an access past the end of a tensor.
  local caching=()
  if [ "$3" = memcheck ]; then caching=(PYTORCH_NO_CUDA_MEMORY_CACHING=1); fi
  part "compute-sanitizer $1" "$2" compute-sanitizer --tool "$3" --error-exitcode 9 \
    env ${caching[@]+"${caching[@]}"} python3 -m pytest -p no:cacheprovider "$4" ${narrow:+-k "$narrow"}
}

# timed NAME SELECTION FILES...: no benchmark is started near the end, when kernels' names are recorded.
timed() {
  local name=$1 selection=$2 left=$((total - SECONDS - 50))
  shift 2
  pytest "$name" $((left + 50)) "not cpu_ and not one_step and $selection" "$@" --benchmark-only \
    --bench-seconds="$left" --benchmark-json="$out/$run.json"
}

{
  date -u
  python3 -m bench.harness.machine
  timeout 30 nvidia-smi
  python3 -m pip list 2>/dev/null
} >"$out/environment.txt" 2>&1
export PATH=$PATH:/usr/local/cuda/bin

attention_tests=() operator_tests=()
large=tests/gpu/test_large_tensors_gpu.py
for file in tests/gpu/test_*.py; do
  case $file in
    $large) ;;
    *_attention_gpu.py | *_varlen_gpu.py | *_sdpa_cases_gpu.py | *_kappa_gpu.py | *_transformers_gpu.py | *_timm_gpu.py)
      attention_tests+=("$file") ;;
    *) operator_tests+=("$file") ;;
  esac
done

case $stage in
  first)
    native_library
    # The gate of one shape: compiles the kernels, runs them and compares with float64.
    pytest "one shape of each" 170 \
      "one_of_each or adapter_gpt2-both-eager-leaner or adapter_vit-both-eager-leaner" \
      bench --benchmark-disable
    # What every row takes of the GPU, before anything is timed.
    pytest "one step of every row" 220 "one_step and not cpu_" \
      bench/networks/bench_models.py bench/networks/bench_language.py \
      --benchmark-only --bench-seconds=190 --benchmark-json="$out/$run.json"
    ;;
  attention)
    # What a part of them found is no record of all models.
    record=() && [ -n "$narrow" ] || record=(--compat-results="$out/compatibility.json")
    parallel "tests/gpu, attention" $total "" "${attention_tests[@]}" ${record[@]+"${record[@]}"}
    ;;
  operators)
    native_library
    parallel "tests/gpu, operators" $total "" "${operator_tests[@]}"
    ;;
  memory)
    native_library
    pytest "tests/gpu, large tensors" 300 "" $large -rs --durations=15
    if ! command -v compute-sanitizer >/dev/null; then
      echo "compute-sanitizer: not run, it is not on PATH" | tee -a "$found"
    else
      # The barriers of Triton's kernels are the compiler's: no racecheck.
      sanitize "memcheck, Triton kernels" 120 memcheck tests/gpu/test_guard_pages_gpu.py
      for tool in memcheck racecheck synccheck; do
        sanitize $tool 60 $tool tests/gpu/test_native_kappa.py
      done
    fi
    ;;
  bench)
    native_library
    timed "benchmarks" "not flex and not compiled" \
      bench/attention/bench_attention.py bench/kappa/bench_kappa.py bench/cross_entropy/bench_cross_entropy.py
    ;;
  models)
    timed "models" "not flex and not compiled" \
      bench/networks/bench_models.py bench/networks/bench_language.py \
      bench/adapters/bench_adapters.py bench/attention/bench_memory.py
    ;;
  compiled) timed "compiled" "(flex or compiled)" bench ;;
  listops_seeds)
    # What is stopped keeps its checkpoint, and a seed that is finished is not trained again.
    for model in nystromformer_listops_lean nystromformer_listops; do
      part "$model, five seeds" $total python3 train/lra.py --task listops \
        --model $model --seeds 5 --resume auto --out "$out/$model" --cache "$out/data"
    done
    ;;
esac

summary=$out/summary.txt
: >"$summary"
for each in "${stages[@]}" listops_seeds; do
  for file in "$out/$each".txt "$out/$each"-*.txt; do
    [ ! -s "$file" ] || { echo "$(basename "$file" .txt)" && cat "$file"; } >>"$summary"
  done
done
results=()
for file in "$out"/*.json; do
  [ ! -s "$file" ] || results+=("$file")
done
if [ ${#results[@]} -gt 0 ]; then
  if python3 -c 'import pandas, tabulate' 2>/dev/null; then
    python3 -m bench.report "${results[@]}" >>"$summary" 2>&1 || failed=1
  else
    echo "no tables: pandas or tabulate is missing; where they are: python -m bench.report *.json" >>"$summary"
  fi
fi
echo
cat "$summary"
for ((i = 0; i + 1 < ${#stages[@]}; i++)); do
  if [ "${stages[i]}" = "$stage" ]; then echo "next: bench/gpu.sh $1 ${stages[i + 1]}"; fi
done
exit $failed
