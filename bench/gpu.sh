#!/usr/bin/env bash
# bench/gpu.sh OUTDIR STAGE [-k EXPRESSION]: check and measure this checkout on a GPU that is rented by the minute.
# Each stage ends within four minutes, so that two fit one call of ten, and names the next one, most telling first:
#
#   training   whole steps of ViT-B, BERT and GPT-2, original and lean, ours beside timm and transformers, eager; timm's
#              model after `use`; three compiled ViT-B steps by kernel (steps-profile.json); KappaMonitor off and every
#              50, 10 and 1 steps
#   training_compiled   the same steps through torch.compile; rows left over: -k gpt2_tinystories, ...
#   training_graphs     with CUDA graphs (reduce-overhead)
#   training_autotune   with max-autotune-no-cudagraphs, which compiles each model for one to three minutes: run it
#              again, -k model_vit_base_lean, -k crammed_bert, ..., until no row is left over
#   first      the native library; one shape of each operator against float64, end to end
#   memory     tensors of more than 2**31 elements, one test at a time, then compute-sanitizer: the native library,
#              and every Triton kernel on a few small shapes (no GPU has run either yet)
#   attention  tests of a GPU (pytest --backend gpu): softmax attention, and models of transformers on it
#   bench      attention, other operators and condition numbers, timed: -k "both-graph and leaner" has statistics and
#              captures of every case beside plain calls
#   peers      attention of every library beside ours: the textbook formula (eager), FlexAttention, flash-attn, xformers
#   inference  ViT-B: one image and a full batch, eager and replayed as CUDA graphs (reduce-overhead)
#   crossover  from which length on PyTorch's attention is faster (python -m bench.crossover reads it)
#   rows       two steps of every row of the paper at its batch: peak memory, beside the ratio that the paper prints
#   run        three minutes of train/vit.py at ViT-B's size: NCCL, compiled, kappa on, killed once and resumed
#   operators  the rest of them: other operators, transforms, fuzzing, torch.compile, training
#   profile    Nsight Compute of attention: with -k "CASE ..." of the cases named (vit_base bert davit_stage1)
#   models     the other models, timed
#   compiled   what is slow to compile: formulas of operators, and the other models, through torch.compile
#
# EXPRESSION, pytest's, narrows a stage: "bench -k 'lra or long_2048'", "models -k xcit".
# A stage of its own, "listops_seeds", trains the two ListOps rows in full, five seeds each, into folders of OUTDIR:
# that takes longer, so run it again with the same OUTDIR until both have passed; no seed starts over.
# Needs no network and no install: python3 on PATH with torch, triton, pytest, pytest-benchmark and hypothesis; with
# pandas and tabulate the summary ends with tables of what was measured. LEANER_COMMIT names the commit of a copy
# without git.
# OUTDIR gathers stages: each writes STAGE.txt, STAGE.log, of what it timed STAGE.json, and summary.txt anew from all
# that lie there, which is also printed last. STAGE.log gets a line as each test ends.
# Exits 0 when everything that ran passed, 1 when something failed or was stopped, 2 when it cannot start.
set -u

stages=(
  training training_compiled training_graphs training_autotune first memory attention bench peers inference crossover
  rows run operators profile models compiled
)

refuse() {
  echo "bench/gpu.sh: $*" >&2
  exit 2
}

usage="bench/gpu.sh OUTDIR STAGE [-k EXPRESSION]"
case " $* " in
  *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
    exit
    ;;
esac
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

total=205       # seconds until the last part must end; the summary needs some of four minutes too
largest=8000000 # bytes that are kept of one log
failed=0
run=$stage${narrow:+-${narrow//[^A-Za-z0-9]/-}}
run=${run:0:60}
found=$out/$run.txt log=$out/$run.log
rm -f "$log" "$out/$run".json* "$out/$run"-[0-9].json*
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
  timeout --signal=INT --kill-after=10 "$limit" "$@" >>"$log" 2>&1
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

has() { python3 -c "import $1" 2>/dev/null; }

# pytest NAME SECONDS SELECTION ARGUMENTS...: SELECTION is an expression or empty.
pytest() {
  local name=$1 limit=$2 selection=$3
  shift 3
  if [ -n "$narrow" ]; then selection="($narrow)${selection:+ and ($selection)}"; fi
  part "$name" "$limit" python3 -m pytest -p no:cacheprovider "$@" ${selection:+-k "$selection"}
}

# Most of the time of tests is compiling and references in float64 on the CPU, which processes share where
# pytest-xdist is installed: 780 tests took 340 s on 14 workers. A test that hangs is ended where pytest-timeout is.
parallel() {
  local workers=$(($(nproc) * 7 / 8)) more=()
  [ "$workers" -ge 1 ] || workers=1
  [ "$workers" -le 14 ] || workers=14
  if has xdist; then more=(-n "$workers"); fi
  if has pytest_timeout; then more+=(--timeout=100); fi
  # A file that cannot be imported here fails alone; the log has what was skipped, and why.
  OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 pytest "$@" ${more[@]+"${more[@]}"} -v -rs \
    --durations=15 --continue-on-collection-errors
}

native_library() {
  if ! compgen -G 'leaner_kernels/csrc/*.cu' >/dev/null; then
    echo "native library: nothing to build, leaner_kernels/csrc holds no .cu file" | tee -a "$found"
  elif ! command -v cmake >/dev/null || ! command -v nvcc >/dev/null; then
    echo "native library: not built, cmake or nvcc is not on PATH" | tee -a "$found"
  elif compgen -G 'leaner_kernels/libleaner_kernels_native.so' >/dev/null; then
    echo "native library: built already" | tee -a "$found"
  else
    part "native library" 60 sh -c \
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

# timed NAME SECONDS SELECTION FILES...: no benchmark is started near the end, when kernels' names are recorded.
# Several parts of a stage write STAGE.json, STAGE-2.json, ...
parts=0
timed() {
  local name=$1 limit=$2 selection=$3 left=$((total - SECONDS)) file
  shift 3
  [ "$limit" -le "$left" ] || limit=$left
  parts=$((parts + 1))
  file=$out/$run$([ $parts = 1 ] || echo "-$parts").json
  pytest "$name" "$limit" "not cpu_${selection:+ and ($selection)}" "$@" --benchmark-only \
    --bench-seconds="$((limit > 40 ? limit - 15 : limit * 2 / 3))" --benchmark-json="$file"
}

# compile_ahead NAME SECONDS SELECTION FILES...: fill Inductor's cache, several rows at once, before they are timed.
compile_ahead() {
  local name=$1 limit=$2 selection=$3
  shift 3
  has xdist || return 0
  OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 pytest "$name" "$limit" "not cpu_ and ($selection)" "$@" \
    --benchmark-disable -n 12 --dist load
}

# killed SECONDS COMMAND...: run, and end it and the processes it started as a machine that fails does.
killed() {
  local limit=$1
  shift
  "$@" &
  sleep "$limit"
  pkill -KILL -f '^[^ ]*python[^ ]* .*train/vit\.py' # not the shell that waits here
  wait $!
  [ $? -eq 137 ]
}

{
  date -u
  python3 -m bench.harness.machine
  timeout 30 nvidia-smi
  timeout 20 python3 -m pip list 2>/dev/null
} >"$out/environment.txt" 2>&1
export PATH=$PATH:/usr/local/cuda/bin

attention_tests=() operator_tests=()
large=tests/gpu/test_large_tensors_gpu.py
for file in tests/gpu/test_*.py tests/ops/test_*.py; do
  case $file in
    $large) ;;
    */test_softmax*.py | */test_qkvpacked.py | */test_varlen.py | */test_sdpa_cases.py | *_kappa_gpu.py | *_transformers_gpu.py)
      attention_tests+=("$file") ;;
    *) operator_tests+=("$file") ;;
  esac
done
whole="training and (model_vit_base or crammed_bert or gpt2_tinystories)"
modes="autotune or graphs" # of rows with compiled models, beside torch.compile's default

case $stage in
  training)
    native_library
    timed "whole steps" 90 "$whole and not compiled" bench/networks
    [ -n "$narrow" ] || part "steps by kernel" 60 python3 -m bench.networks.profile_steps \
      model_vit_base_lean leaner_compiled --json "$out/steps-profile.json"
    timed "monitored steps" 45 "vit_base_lean_step" bench/kappa/bench_kappa.py
    ;;
  training_compiled)
    compile_ahead "compiled ahead" 60 "$whole and compiled and not ($modes)" bench/networks
    timed "whole steps, compiled" 190 "$whole and compiled and not ($modes)" bench/networks
    ;;
  training_graphs)
    compile_ahead "compiled ahead" 60 "$whole and graphs" bench/networks
    timed "whole steps, CUDA graphs" 190 "$whole and graphs" bench/networks
    ;;
  # One after another: what times candidates must not share the GPU.
  training_autotune) timed "whole steps, max-autotune" $total "$whole and autotune" bench/networks ;;
  first)
    native_library
    # The gate of one shape: compiles the kernels, runs them and compares with float64.
    pytest "one shape of each" 150 one_of_each bench --benchmark-disable
    ;;
  attention)
    parallel "tests of a GPU, attention" $total "" --backend gpu "${attention_tests[@]}"
    ;;
  bench)
    native_library
    timed "benchmarks" $total "not (compiled or flex)" bench/attention bench/kappa
    ;;
  peers)
    compile_ahead "FlexAttention, compiled ahead" 60 "both-graph and flex" bench/attention
    timed "peers" 190 "both-graph and not (stats or compiled)" bench/attention
    ;;
  inference)
    compile_ahead "compiled ahead" 90 "model_vit_base and (inference or one_image) and compiled" bench/networks
    timed "inference" 120 "model_vit_base and (inference or one_image)" bench/networks
    ;;
  crossover)
    # Few heads and float32 first; a sweep that is cut off names what it did not reach.
    part "crossover" $total python3 -m bench.crossover --sweep "$out/crossover.json" --seconds 185
    ;;
  rows)
    part "memory of every row" $total bash -c 'python3 -m bench.memory --json >"$1"' memory "$out/memory.json"
    ;;
  run)
    train=(python3 -m torch.distributed.run --standalone --nproc-per-node=gpu train/vit.py --data synthetic --model vit_base_lean --compile
      --steps 100000 --kappa-every 20 --ckpt-every 100 --out "$out/run")
    rm -rf "$out/run"
    part "a run, killed" 100 bash -c "$(declare -f killed)"$'\nkilled "$@"' killed 75 "${train[@]}"
    part "the run, resumed" 115 bash -c 'timeout --signal=TERM 90 "$@"; [ $? -eq 124 ]' resumed "${train[@]}"
    ;;
  operators)
    native_library
    parallel "tests of a GPU, operators" $total "" --backend gpu "${operator_tests[@]}"
    ;;
  memory)
    native_library
    pytest "tests of a GPU, large tensors" 90 "" $large -v -rs --durations=15
    if ! command -v compute-sanitizer >/dev/null; then
      echo "compute-sanitizer: not run, it is not on PATH" | tee -a "$found"
    else
      # The barriers of Triton's kernels are the compiler's: no racecheck.
      sanitize "memcheck, Triton kernels" 60 memcheck tests/gpu/test_guard_pages_gpu.py
      for tool in memcheck racecheck synccheck; do
        sanitize $tool 30 $tool tests/gpu/test_native_kappa.py
      done
    fi
    ;;
  profile)
    command -v ncu >/dev/null || refuse "ncu is not on PATH: nothing to profile with"
    read -ra cases <<<"${narrow:-vit_base bert davit_stage1}"
    narrow=
    part "Nsight Compute" 140 ncu --profile-from-start off --clock-control none --set full -f -o "$out/$run" \
      python3 -m bench.shape --profile "${cases[@]}"
    # The report itself is tens of megabytes: what is read of it is text.
    if [ -s "$out/$run.ncu-rep" ]; then
      timeout 30 ncu -i "$out/$run.ncu-rep" --page details >"$out/$run.details.log"
      timeout 30 ncu -i "$out/$run.ncu-rep" --page source --csv | gzip >"$out/$run.source.csv.gz"
      rm "$out/$run.ncu-rep"
    fi
    ;;
  models)
    timed "models" $total "not compiled and not ($whole)" bench/networks
    ;;
  compiled) timed "compiled" $total "compiled and not ($modes) and not ($whole)" bench ;;
  listops_seeds)
    total=510
    # What is stopped keeps its checkpoint; a seed that is finished is only evaluated again.
    for seed in 0 1 2 3 4; do
      for model in nystromformer_listops_lean nystromformer_listops; do
        part "$model, seed $seed" $total env XDG_CACHE_HOME="$out/data" python3 train/lra.py \
          --model $model --seed $seed --resume auto --out "$out/$model-$seed"
      done
    done
    ;;
esac

summary=$out/summary.txt
: >"$summary"
for name in "${stages[@]}" listops_seeds; do
  for file in "$out/$name".txt "$out/$name"-*.txt; do
    [ ! -s "$file" ] || { echo "$(basename "$file" .txt)" && cat "$file"; } >>"$summary"
  done
done
results=()
for file in "$out"/*.json; do
  case $file in */crossover.json | */memory.json | */steps-profile.json) continue ;; esac
  [ ! -s "$file" ] || results+=("$file")
done
if [ ${#results[@]} -gt 0 ]; then
  if python3 -c 'import pandas, tabulate' 2>/dev/null; then
    timeout 20 python3 -m bench.report "${results[@]}" >>"$summary" 2>&1 || failed=1
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
