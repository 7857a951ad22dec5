#!/usr/bin/env bash
# A quarter of an hour of one GPU, in commands of under ten minutes on one machine. What each is for is its plan:
#
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh kernels    # A: where the time of a step goes, kernels, the rows of today
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh tests      # A, second command: the tests that need a GPU
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh train      # B: Penn Treebank; the same again goes on from a checkpoint
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh weights    # B, at its end: what comes back, in parts of under 16 MiB
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh conformer  # C: Parakeet's encoder; an hour of audio in one pass
#
# The first number of a step is after how many seconds it is stopped; those of a plan add up to at most 585. With DRY=1
# the steps are printed and not run. Besides the tree it needs torch with CUDA, triton, transformers and accelerate;
# wheels of pytorch_optimizer (A, B) and of datasets with what it needs (B) in .whl, and for B data/ptb, which
# `txl-prepare --corpus ptb` writes: 6 MiB together.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
PLAN=${1:?one of kernels, tests, train, weights, conformer}
WHEELS=$(ls .whl/*.whl 2>/dev/null | tr '\n' ':')
export PYTHONUNBUFFERED=1 PYTHONPATH="src:$WHEELS${PYTHONPATH:-}"
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/ptb}

step() {
    local limit=$1
    shift
    echo "== $limit s: $*"
    [ -n "${DRY:-}" ] || timeout -s INT -k 5 "$limit" "$@" 2>&1 | tee -a "$OUT/log"
}
profile() {
    step "$1" "$PYTHON" benchmarks/profile_step.py --device cuda --output "$OUT/notes.txt" \
        --workload "$2" --contender "$3"
}
model() {
    step "$1" "$PYTHON" benchmarks/model.py --device cuda --output "$OUT/model.csv" --seconds 8 --repeats 3 20 \
        --workloads "$2" --contenders "$3"
}
conformer() {
    step "$1" "$PYTHON" benchmarks/conformer.py --device cuda --dtype bf16 --output "$OUT/conformer.csv" "${@:2}"
}
train() {
    step "$1" "$PYTHON" examples/train_lm.py "examples/recipes/$2.yaml" --data data/ptb "${@:3}"
}

[ -n "${DRY:-}" ] || mkdir -p "$OUT"
case $PLAN in
kernels)
    step 10 nvidia-smi
    profile 45 train-nvidia-large ours-txl_triton-compile
    profile 40 train-nvidia-base ours-txl_triton-compile
    profile 30 evaluate-nvidia-large-1600-b32 ours
    profile 40 decode-nvidia-base-640-b1 ours-graph
    step 75 "$PYTHON" benchmarks/attention_kernel.py --device cuda --output "$OUT/attention_kernel.csv" --seconds 0.5 \
        --contenders txl_triton sdpa --shapes nvidia-base-B256 nvidia-large-B32 enwik8-large-B8 wt103-base-B60 long-m16384
    model 55 train-nvidia-base ours-txl_triton-compile
    model 60 train-nvidia-large ours-txl_triton-compile
    model 40 decode-nvidia-base-640-b1 ours-graph
    model 40 decode-nvidia-base-640-b32 ours-graph
    model 40 evaluate-nvidia-base-640-b1 ours
    model 40 train-wikitext2-b32 ours-txl_triton-graphs
    train 50 ptb --output runs/ptb-begun --max_steps 1500 --logging_steps 100
    ;;
tests)
    step 150 "$PYTHON" -m pytest -q -p no:cacheprovider -m "gpu and not slow" tests/kernels tests/transfo_xl
    model 60 train-nvidia-base ours-txl_triton-compile-graphs
    ;;
train)
    train 585 ptb_quarter --output "$RUN" --resume
    ;;
weights)
    step 60 "$PYTHON" -c '
import sys
import safetensors.torch as files
import torch
weights = files.load_file(sys.argv[1])
narrow = {name: x.bfloat16() if x.is_floating_point() else x for name, x in weights.items()}
files.save_file(narrow, sys.argv[2], metadata={"format": "pt"})
' "$RUN/model.safetensors" "$OUT/model.safetensors"
    step 10 split --bytes 15M --numeric-suffixes "$OUT/model.safetensors" "$OUT/model.safetensors."
    step 5 rm "$OUT/model.safetensors"
    step 5 cp "$RUN/results.json" "$RUN/config.json" "$OUT"
    ;;
conformer)
    step 10 nvidia-smi
    step 90 "$PYTHON" -m pytest -q -p no:cacheprovider -m "gpu and not slow" -k "both_directions or encoder" \
        tests/kernels
    conformer 150 --audio 3600 --repeats 1 3 --contenders ours
    conformer 300 --audio 300 30 --seconds 5 --train 16
    ;;
*)
    echo "gpu_quarter.sh: $PLAN is none of kernels, tests, train, weights, conformer" >&2
    exit 2
    ;;
esac
