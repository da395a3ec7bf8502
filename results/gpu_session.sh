#!/usr/bin/env bash
# The calls of a session on a GPU machine: results/next_gpu_session.md. What comes back is written to $OUT.
#   gpu_session.sh tests     GPU tests, and speed of every network; cells of evidence/ train while programs compile
#   gpu_session.sh speed     other ways to compute convolutions, first steps, exactness, learning, tiles
#   gpu_session.sh queue 9.3 [OPTIONS]   train_queue.py for so many minutes
set -u
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 PYTHONPATH=$PWD/src:$HOME/site GRADSHARE_DATA=$HOME/store
export TORCHINDUCTOR_CACHE_DIR=$HOME/inductor TRITON_CACHE_DIR=$HOME/triton
if [ ! -d "$HOME/site" ] && [ -d carry/wheels ]; then # nothing can be installed there: wheels are carried and unpacked
  mkdir -p "$HOME/site" "$GRADSHARE_DATA"
  for wheel in carry/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$HOME/site"; done
  tar xzf carry/glyphs.tgz -C "$GRADSHARE_DATA"
fi
began=$SECONDS

seconds() { echo "-- $1 after $((SECONDS - began)) s"; }

queue() { # MINUTES OPTIONS; its run folders stay as long as the machine does
  minutes=$1
  shift
  python3 results/train_queue.py --minutes "$minutes" --workers 4 --out "$OUT" --state carry/queue_state "$@"
}

signal_cells() { # STOP or CONT: all trainings of the queue
  python3 - "$1" <<'PY'
import os, signal, sys
from pathlib import Path

for process in Path("/proc").glob("[0-9]*"):
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        continue  # it has just ended
    if b"--cell" in words and any(word.endswith(b"train_queue.py") for word in words):
        os.kill(int(process.name), getattr(signal, f"SIG{sys.argv[1]}"))
PY
}

tests() { # 8 processes, since most of their time is compiling
  files="tests/engine/test_gpu.py tests/engine/test_traced_gpu.py tests/engine/test_implicit.py
    tests/engine/test_kernels.py tests/engine/test_kernels_gpu.py tests/engine/test_kernels_learner.py
    tests/engine/test_kernels_sharing.py tests/learners/test_gpu_steps.py tests/data/test_gpu_tasks.py
    tests/runs/test_gpu_train.py"
  started=()
  for part in 0 1 2 3 4 5 6 7; do
    # shellcheck disable=SC2086
    SHARD=$part/8 timeout -k 5 170 python3 -m pytest $files -v -p no:cacheprovider --tb=short >"$work/tests-$part.txt" 2>&1 &
    started+=($!)
  done
  timeout -k 5 170 python3 benchmarks/general.py "$work" --only prepare >"$work/prepare.txt" 2>&1 &
  wait "${started[@]}" $!
  tail -qn 1 "$work"/tests-*.txt
  grep -h "^FAILED\|^ERROR" "$work"/tests-*.txt | cut -c1-200 | head -30
  cut -c1-300 "$work/prepare.txt"
}

work=$HOME/$1
mkdir -p "$work"
case $1 in
tests)
  python3 -c "import torch, triton; print(torch.__version__, triton.__version__)"
  queue 8.6 --parts evidence >"$work/queue.txt" 2>&1 &
  trainings=$!
  tests
  seconds "tests and programs"
  signal_cells STOP # nothing else on the GPU while steps are timed
  timeout -k 5 30 python3 benchmarks/convolutions.py "$work/convolutions.json" --seconds 20 >"$work/convolutions.txt" 2>&1
  timeout -k 5 240 python3 benchmarks/general.py "$work" --only resnet --only users --only methods --only profiles \
    2>&1 | tee "$work/general.txt" | cut -c1-200
  seconds "timings"
  signal_cells CONT
  wait "$trainings"
  tail -n 25 "$work/queue.txt" | cut -c1-150
  ;;
speed)
  timeout -k 5 570 python3 benchmarks/general.py "$work" --only streams --only first --only precisions --only tilings \
    2>&1 | tee "$work/general.txt" | cut -c1-200
  ;;
queue)
  shift
  queue "$@"
  exit
  ;;
*)
  echo "a call is tests, speed or queue, not $1" >&2
  exit 2
  ;;
esac
seconds "all"
tar czf "$OUT/$1.tar.gz" -C "$work" .
