#!/usr/bin/env bash
# Pretrain a GPT, or with MODEL=hybrid a hybrid model, with Seq1F1B on the GPUs of this machine, or a tiny one on its
# CPU.
#
#   bash scripts/pretrain.sh                                  # tiny, two processes, no GPU
#   MODEL_SIZE=2.7b SEQ_LENGTH=32768 bash scripts/pretrain.sh  # 8 GPUs
#   DRY_RUN=1 MODEL_SIZE=30b bash scripts/pretrain.sh          # rehearsed here, as if on 64 GPUs
#   SCRIPT=pretrain_gpt.py bash scripts/pretrain.sh           # Megatron's GPTModel in place of its HybridModel
#   MODEL_SIZE=2.7b DATA_PATH=data/corpus TOKENIZER_MODEL=data/tokenizer bash scripts/pretrain.sh
#
# scripts/models.sh lists the sizes and all variables. Arguments go to the training script, whose
# own --help lists them (python pretrain_hybrid.py --help):
#   bash scripts/pretrain.sh --train-iters 5
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/checks.sh
source scripts/checks.sh
help_if_asked scripts/pretrain.sh "$@"

# shellcheck source=scripts/models.sh
source scripts/models.sh
check_python
check_world 1
check_data
make_flags
[ "$DRY_RUN" != 1 ] || rehearse "$@"

exec "$PYTHON" "${torchrun[@]}" --nproc-per-node "$GPUS_PER_NODE" \
    "$SCRIPT" "${flags[@]}" "$@"
