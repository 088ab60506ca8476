#!/usr/bin/env bash
# Everything that needs a GPU, in one call, each part under a time limit, its output kept under $OUT.
#
#   bash benchmarks/gpu_session.sh                       # every part, in this order
#   bash benchmarks/gpu_session.sh tests decode recall   # some of them
#   WORKERS=8 bash benchmarks/gpu_session.sh core        # the tests that CUDA matters to, in 8 processes
#   TIERED_KV_COMMIT=abc1234 OUT=out LIMIT=590 bash benchmarks/gpu_session.sh
#
# LIMIT: seconds for all of it (default 590). A part is not begun with less than 15 seconds left.
# DECODE_ARGS: more for benchmarks.decode, such as "--kv prefetch=next_layer" or "--contexts 131072 --miss 0.1".
# TAIL: lines of each part's output to show (default 25).
# TIERED_KV_COMMIT: what the rows call the commit where there is no git repository.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results/session}
LIMIT=${LIMIT:-590}
export PYTHONPATH=${PYTHONPATH:-$PWD} PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
export TIERED_KV_COMMIT=${TIERED_KV_COMMIT:-unknown}
mkdir -p "$OUT"

part() { # name, seconds, command...
  local name=$1 seconds=$2 left=$((LIMIT - SECONDS))
  shift 2
  [ "$left" -lt 15 ] && { echo "== $name: skipped, $left s left"; return; }
  [ "$seconds" -gt "$left" ] && seconds=$left
  local began=$SECONDS
  echo "== $name (at most $seconds s): $*"
  timeout --signal="${SIGNAL:-TERM}" --kill-after=10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  tail -n "${TAIL:-25}" "$OUT/$name.log" | cut -c1-220
  echo "== $name: exit $status after $((SECONDS - began)) s"
}

# Tests: names as they fail (-v, so that they survive a limit), reasons at the end, also when a limit interrupts pytest.
# On all cores where pytest-xdist is installed.
run_tests() { # name, seconds, tests...
  local name=$1 seconds=$2 spread=()
  shift 2
  python -c "import xdist" 2>/dev/null && spread=(-n "${WORKERS:-14}" --dist worksteal)
  SIGNAL=INT part "$name" "$seconds" python -m pytest "${spread[@]}" -v -rfE --tb=short --durations=10 "$@"
  grep -E "(FAILED|ERROR)" "$OUT/$name.log" | sort -u | head -n 40 | cut -c1-220
}

# What runs otherwise on CUDA than on the CPU: kernels, streams, page-locked memory and graphs, and models through them.
CORE="graphs prefetch modes layer invariance dispatch equality host_store pinned cluster_cache replacement planning
  clustering kernel_attend kernel_select kernel_lookup kernel_recall kernel_score kernel_flash kernel_count kernel_kmeans
  kernel_summarise kernel_pack"

run_part() {
  case $1 in
  tests) run_tests tests 300 tests ;;
  core) run_tests core 240 $(printf 'tests/test_%s.py ' $CORE) ;;
  clustering) part clustering 90 python -m benchmarks.clustering --out "$OUT/clustering.jsonl" ;;
  kernels) part kernels 120 python -m benchmarks.kernels --out "$OUT/kernels.jsonl" ;;
  decode) part decode 360 python -m benchmarks.decode --out "$OUT/decode.jsonl" ${DECODE_ARGS:-} ;;
  quick) part decode 240 python -m benchmarks.decode --quick --out "$OUT/decode.jsonl" ${DECODE_ARGS:-} ;;
  profile) part profile 90 python -m benchmarks.decode --profile --contexts 131072 --miss 0.1 ;;
  prefill) part prefill 150 python -m benchmarks.prefill --out "$OUT/prefill.jsonl" ;;
  recall) part recall 60 python -m benchmarks.recall --out "$OUT/recall.jsonl" ;;
  memory) part memory 60 python -m benchmarks.memory --out "$OUT/memory.jsonl" ;;
  # Under a cap freed memory must serve the next buffer, whatever its size.
  capped) part capped 240 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    python -m benchmarks.decode --cap-gib 24 --longest --out "$OUT/decode.jsonl" ${DECODE_ARGS:-} ;;
  prefill_capped) part prefill_capped 150 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    python -m benchmarks.prefill --contexts 131072 --cap-gib 24 --out "$OUT/prefill.jsonl" ;;
  small) part small 200 python -m benchmarks.small_models --out "$OUT/small_models.jsonl" ;;
  trace) part trace 120 python -m benchmarks.traces record gemma3-270m --tokens 30000 \
    --folder "$OUT" ;;
  *) echo "unknown part $1" >&2 ;;
  esac
}

for name in ${*:-tests clustering kernels decode prefill recall}; do run_part "$name"; done
