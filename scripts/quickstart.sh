#!/usr/bin/env bash
# Train the same small GPT twice on two CPU processes, with Megatron's own 1F1B and with Seq1F1B, on real text: the
# modules of the standard library. Then lay time, memory, losses and timelines side by side.
#
#   bash scripts/quickstart.sh                      # at most four minutes on two cores, set-up included
#   TRAIN_ITERS=80 bash scripts/quickstart.sh       # losses fall further
#   OUTPUT=/somewhere bash scripts/quickstart.sh    # a new folder, or one of an earlier quick start; default: ./quickstart
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

: "${OUTPUT:=quickstart}"
: "${TRAIN_ITERS:=8}"
: "${SEQ_LENGTH:=4096}" # 1,024 tokens a segment: the CPU's attention kernel slows down below
: "${NUM_MICRO_BATCHES:=2}"
: "${SEQUENCE_SPLITS:=4}"
: "${VOCAB_SIZE:=1024}" # few words, so that the last rank, which has their logits, works as long as the first
export OMP_NUM_THREADS=1
# Six processes import PyTorch and Megatron; without byte code each would compile them anew.
unset PYTHONDONTWRITEBYTECODE

# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/quickstart.sh "$@"
check_words scripts/quickstart.sh 0 "$@"
check_numbers 999999999 TRAIN_ITERS SEQ_LENGTH NUM_MICRO_BATCHES SEQUENCE_SPLITS VOCAB_SIZE
[[ $OUTPUT != -* ]] || OUTPUT=./$OUTPUT # else an option of what it is handed to
own_folder "$OUTPUT"

# train NAME FLAGS...: one training run; its log in $OUTPUT/NAME/log.txt, progress on the terminal.
train() {
    local name=$1 log=$OUTPUT/$1/log.txt
    shift
    rm -rf "${OUTPUT:?}/$name"
    mkdir -p "$OUTPUT/$name"
    echo "Starting (Megatron takes a while to import); the whole log is in $log"
    # A rank that is aborted leaves the stacks of its threads in the log.
    PYTHONFAULTHANDLER=1 .venv/bin/python "${torchrun[@]}" --nproc-per-node 2 pretrain_hybrid.py \
        --device cpu --pipeline-model-parallel-size 2 \
        --hybrid-layer-pattern "*-*-|*-*-" --hidden-size 256 --num-attention-heads 2 \
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope \
        --untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear \
        --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 1 --global-batch-size "$NUM_MICRO_BATCHES" \
        --train-iters "$TRAIN_ITERS" --lr 4e-3 --lr-warmup-iters 2 --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1 \
        --data-path "$OUTPUT/data/stdlib" --split 98,2,0 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUTPUT/data/tokenizer" \
        --log-interval 1 --eval-iters 1 --eval-interval 1000 \
        --tensorboard-dir "$OUTPUT/$name/tensorboard" \
        --pipeline-trace "$OUTPUT/$name/trace" --pipeline-trace-iterations "$traced" \
        "$@" 2>&1 | tee "$log" | show_progress ||
        die "training failed; see the end of $log: $(grep -E 'Error|error:|Signal ' "$log" | grep -v ChildFailedError | tail -n 1)"
}

# Megatron's line per iteration, shortened. Not in awk: mawk reads a pipe in blocks, so that lines come minutes late.
show_progress() {
    local line number='([0-9.E+-]+)'
    while IFS= read -r line; do
        if [[ $line =~ \ iteration\ +([0-9]+)/\ +([0-9]+) ]]; then
            local iteration=${BASH_REMATCH[1]}/${BASH_REMATCH[2]}
            [[ $line =~ elapsed\ time\ per\ iteration\ \(ms\):\ *$number ]] || continue
            local seconds=${BASH_REMATCH[1]}e-3
            [[ $line =~ lm\ loss:\ *$number ]] || continue
            LC_ALL=C printf '  iteration %7s   %6.2f s   loss %.4f\n' "$iteration" "$seconds" "${BASH_REMATCH[1]}"
        elif [[ $line == *"validation loss at iteration"* && $line == *"validation set"* && $line =~ lm\ loss\ value:\ *$number ]]; then
            LC_ALL=C printf '  validation loss     %.4f\n' "${BASH_REMATCH[1]}"
        fi
    done
}

# Of other programs, before ours start.
load=$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo 0)
bash scripts/setup.sh
mkdir -p "$OUTPUT/data"
((traced = TRAIN_ITERS < 6 ? TRAIN_ITERS : 6))

echo "== Text: the modules of the standard library"
stdlib=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
.venv/bin/seq1f1b preprocess --input "$stdlib"/*.py --on-error skip \
    --train-tokenizer "$VOCAB_SIZE" --tokenizer-model "$OUTPUT/data/tokenizer" \
    --output-prefix "$OUTPUT/data/stdlib" --append-eod --workers 2 --overwrite

echo "== Training with Megatron's own 1F1B: $TRAIN_ITERS iterations of $NUM_MICRO_BATCHES sequences of $SEQ_LENGTH tokens"
train megatron
echo "== Training with Seq1F1B: the same, every sequence in $SEQUENCE_SPLITS segments"
train seq1f1b --sequence-splits "$SEQUENCE_SPLITS"

echo "== Side by side"
.venv/bin/seq1f1b compare "$OUTPUT/megatron" "$OUTPUT/seq1f1b" --output "$OUTPUT/timelines.png"
[ "${load%.*}" -eq 0 ] ||
    echo "Other programs were at work at the start (load $load): take seconds and bubbles from an idle machine."
echo "Curves of both: .venv/bin/tensorboard --logdir $OUTPUT"
