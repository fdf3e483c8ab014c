#!/usr/bin/env bash
# Fine-tune a tiny GPT on long and short conversations, on two processes of this machine's CPU: Megatron's --sft with
# and without --unit-tokens. Five minutes; docs/long-and-short.md.
#
#   bash scripts/finetune.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
: "${OUTPUT:=build/finetune}"
: "${TRAIN_ITERS:=5}"
: "${SEQ_LENGTH:=4096}"
: "${UNIT_TOKENS:=512}"
export OMP_NUM_THREADS=1
# Each program imports PyTorch and Megatron; without byte code each would compile them anew.
unset PYTHONDONTWRITEBYTECODE

# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/finetune.sh "$@"
check_words scripts/finetune.sh 0 "$@"
check_numbers 999999999 TRAIN_ITERS SEQ_LENGTH UNIT_TOKENS
[[ $OUTPUT != -* ]] || OUTPUT=./$OUTPUT # else an option of what it is handed to
own_folder "$OUTPUT"
mkdir -p "$OUTPUT/tokenizer"

bash scripts/setup.sh
if ! .venv/bin/python -c 'import datasets' 2>/dev/null; then
    echo "Bringing in datasets, with which Megatron reads conversations ..."
    uv=$(command -v uv || echo .uv/bin/uv)
    "$uv" pip install --quiet --python .venv/bin/python -c constraints.txt datasets ||
        die "the package datasets could not be brought in, as uv says above. Is there a network?"
fi

echo "== Conversations: how functions and modules of the standard library are written"
.venv/bin/python scripts/conversations.py "$OUTPUT"
.venv/bin/seq1f1b preprocess --input "$OUTPUT/text.jsonl" --train-tokenizer 2048 --tokenizer-model "$OUTPUT/tokenizer" \
    --output-prefix "$OUTPUT/text" --append-eod --workers 2 --overwrite
echo "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}" >"$OUTPUT/tokenizer/chat_template.jinja"

# train NAME FLAGS...: one training run, its iterations on the terminal.
train() {
    local log=$OUTPUT/$1.log
    shift
    .venv/bin/python "${torchrun[@]}" --nproc-per-node 2 pretrain_hybrid.py \
        --device cpu --pipeline-model-parallel-size 2 \
        --hybrid-layer-pattern "*-*-|*-*-" --hidden-size 128 --num-attention-heads 2 --position-embedding-type rope \
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 16 \
        --train-iters "$TRAIN_ITERS" --lr 1e-3 --eval-iters 0 --log-interval 1 \
        --sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer --tokenizer-model "$OUTPUT/tokenizer" \
        --data-path "$OUTPUT/chats.jsonl" --split 100,0,0 --calculate-per-token-loss \
        "$@" >"$log" 2>&1 || die "training failed; see the end of $log"
    sed -nE 's/.*first step has (.*)/  \1/p; s/.* iteration +([0-9]+)\/.*elapsed time per iteration \(ms\): ([0-9.]+).*lm loss: ([0-9.E+-]+).*/  iteration \1   \2 ms   loss \3/p' "$log"
}

echo "== Each conversation padded to $SEQ_LENGTH tokens"
train padded --pipeline-schedule 1f1b
echo "== The same in units of $UNIT_TOKENS tokens"
train units --unit-tokens "$UNIT_TOKENS"
