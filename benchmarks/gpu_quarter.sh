#!/usr/bin/env bash
# A quarter of an hour of one GPU, in commands of under ten minutes on one machine. What each is for is its plan:
#
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh kernels    # A: where the time of a step goes, kernels, the rows of today
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh tests      # A, second command: the tests that need a GPU
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh train      # B: Penn Treebank; the same again goes on from a checkpoint
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh weights    # B, at its end: what comes back, in parts of under 16 MiB
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh read       # B, on a CPU: joins these parts, and reads the text again
#     OUT=FOLDER bash benchmarks/gpu_quarter.sh conformer  # C: Parakeet's encoder; an hour of audio in one pass
#
# The first number of a step is after how many seconds it is stopped; those of a plan add up to at most 585. With DRY=1
# the steps are printed and not run. What has a row of today's code is not measured again (`current.py`); where the copy
# is no repository, give CURRENT="$(python benchmarks/current.py)" of one that is.
#
# Besides the tree it needs torch with CUDA, triton, transformers and accelerate; wheels of pytorch_optimizer (A, B) and
# of datasets with what it needs (B) in .whl, and for B data/ptb, which `txl-prepare --corpus ptb` writes: 6 MiB together.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
PLAN=${1:?one of kernels, tests, train, weights, read, conformer}
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
is_current() {
    CURRENT=${CURRENT-$("$PYTHON" benchmarks/current.py 2>/dev/null)}
    case " $CURRENT " in *" $1 "*) echo "-- current: $1" ;; *) return 1 ;; esac
}
model() {
    is_current "$2:$3" || step "$1" "$PYTHON" benchmarks/model.py --device cuda --output "$OUT/model.csv" \
        --seconds 8 --repeats 3 20 --workloads "$2" --contenders "$3"
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
    is_current nvidia-large-B32:one_backward || step 95 "$PYTHON" benchmarks/attention_kernel.py --device cuda \
        --output "$OUT/attention_kernel.csv" --seconds 0.5 --contenders txl_triton one_backward sdpa \
        --shapes nvidia-base-B256 nvidia-large-B32 enwik8-large-B8 wt103-base-B60 long-m16384
    model 55 train-nvidia-base ours-txl_triton-compile
    model 60 train-nvidia-large ours-txl_triton-compile
    model 40 decode-nvidia-base-640-b1 ours-graph
    model 40 decode-nvidia-base-640-b32 ours-graph
    model 40 evaluate-nvidia-base-640-b1 ours
    model 40 evaluate-nvidia-base-640-long ours
    train 50 ptb --output runs/ptb-begun --max_steps 1500 --logging_steps 100
    ;;
tests)
    step 110 "$PYTHON" -m pytest -q -p no:cacheprovider -m "gpu and not slow" tests/kernels tests/transfo_xl
    model 60 train-wikitext2-b32 ours-txl_triton-compile-graphs
    step 40 "$PYTHON" benchmarks/sliding_window.py --device cuda --dtype bf16 \
        --output "$OUT/sliding_window.csv" --model enwik8-large --segments 4096 --seconds 2 --same-length
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
read)
    step 30 "$PYTHON" -c '
import sys
from pathlib import Path
folder = Path(sys.argv[1])
parts = sorted(folder.glob("model.safetensors.*"))
(folder / "model.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))
' "$OUT"
    # The model alone, with dynamic evaluation, with a cache and with both; rates and cache by the validation text.
    step 7200 "$PYTHON" examples/tune_lm.py --model "$OUT" --data data/ptb --rate 0.001 0.003 0.01 --epsilon 0.01 0.03 \
        --statistics 50000 --cache_size 500 2000 --output "$OUT/tuned.json"
    ;;
conformer)
    step 10 nvidia-smi
    step 90 "$PYTHON" -m pytest -q -p no:cacheprovider -m "gpu and not slow" -k "both_directions or encoder" \
        tests/kernels
    conformer 150 --audio 3600 --repeats 1 3 --contenders ours
    conformer 300 --audio 300 30 --seconds 5 --train 16
    ;;
*)
    echo "gpu_quarter.sh: $PLAN is none of kernels, tests, train, weights, read, conformer" >&2
    exit 2
    ;;
esac
