# shellcheck shell=bash
# What both launchers share: the sizes of a model, and the flags of its training script that they make.
# Every variable can be set in the environment. Sourced at the root of the repository, where relative
# paths start, too.

# shellcheck source=scripts/checks.sh
source scripts/checks.sh
# shellcheck source=scripts/python.sh
source scripts/python.sh

# ----------------------------------------------------------------------------------- the model
# Shapes, TP x PP and sequence lengths of the 2.7b to 30b are those of the Seq1F1B paper
# (arXiv 2406.03488), trained on A100s; SEQ_LENGTH starts at the shortest of its three.
MODEL=${MODEL:-gpt} # gpt; hybrid: three gated delta nets for each attention layer (G*)
# The training script. pretrain_hybrid.py has Megatron's HybridModel, which stays: a GPT is a pattern of *- in it.
# pretrain_gpt.py has its GPTModel, which gets critical fixes only; losses are the same.
: "${SCRIPT:=pretrain_hybrid.py}"
case $MODEL/$SCRIPT in
    gpt/pretrain_hybrid.py | gpt/pretrain_gpt.py | hybrid/pretrain_hybrid.py) ;;
    gpt/*) die "SCRIPT=$SCRIPT does not train MODEL=gpt: take pretrain_hybrid.py or pretrain_gpt.py." ;;
    hybrid/*) die "SCRIPT=$SCRIPT does not train MODEL=hybrid: take pretrain_hybrid.py." ;;
    *) die "MODEL=$MODEL is unknown: take gpt or hybrid." ;;
esac
MODEL_SIZE=${MODEL_SIZE:-tiny}
case $MODEL_SIZE in
    tiny) # a laptop; without a GPU, GPUS_PER_NODE is a number of processes
        : "${DEVICE:=cpu}" "${GPUS_PER_NODE:=2}" "${PRECISION:=fp32}" "${LR:=1e-3}"
        : "${NUM_LAYERS:=4}" "${HIDDEN_SIZE:=128}" "${NUM_HEADS:=4}" "${TP:=1}" "${PP:=2}"
        : "${SEQ_LENGTH:=512}" "${NUM_MICRO_BATCHES:=4}" "${VOCAB_SIZE:=1024}"
        ;;
    2.7b) # 8 GPUs; also 24576 and 32768 tokens
        : "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=2560}" "${NUM_HEADS:=32}" "${TP:=1}" "${PP:=8}"
        : "${SEQ_LENGTH:=16384}" "${NUM_MICRO_BATCHES:=16}"
        ;;
    7b) # 32 GPUs; also 65536 and 131072 tokens, and 16 micro-batches
        : "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${NUM_HEADS:=32}" "${TP:=8}" "${PP:=4}"
        : "${SEQ_LENGTH:=32768}" "${NUM_MICRO_BATCHES:=8}"
        ;;
    13b) # 32 GPUs; also 49152 and 65536 tokens; the number of micro-batches is not published
        : "${NUM_LAYERS:=40}" "${HIDDEN_SIZE:=5120}" "${NUM_HEADS:=40}" "${TP:=8}" "${PP:=4}"
        : "${SEQ_LENGTH:=32768}" "${NUM_MICRO_BATCHES:=8}"
        ;;
    30b) # 64 GPUs; also 49152 and 65536 tokens
        : "${NUM_LAYERS:=64}" "${HIDDEN_SIZE:=6144}" "${NUM_HEADS:=64}" "${TP:=8}" "${PP:=8}"
        : "${SEQ_LENGTH:=32768}" "${NUM_MICRO_BATCHES:=16}"
        ;;
    *) die "MODEL_SIZE=$MODEL_SIZE is unknown: take tiny, 2.7b, 7b, 13b or 30b." ;;
esac
: "${CHUNKS:=1}" # model chunks of a rank
: "${MICRO_BATCH_SIZE:=1}"
: "${VOCAB_SIZE:=32768}" # of --mock-data; real data have their tokenizer's

# --------------------------------------------------------------------------------- the schedule
: "${PIPELINE_SCHEDULE:=1f1b}" # megatron: Megatron's own, for comparison
: "${SEQUENCE_SPLITS:=4}" # or auto: the number of the shortest predicted step that fits the memory
: "${SEQUENCE_SPLIT_STRATEGY:=balanced}" # the paper: uniform_comp
: "${UNIT_TOKENS:=}" # instead of both, for documents that stay apart: the most tokens of a unit; docs/long-and-short.md

# --------------------------------------------------------------------------------- the training
: "${DEVICE:=cuda}" # cuda, cpu
: "${PRECISION:=bf16}" # bf16, fp32
: "${TRAIN_ITERS:=20}"
: "${LR:=6e-5}"
: "${RECOMPUTE:=0}" # 1: recompute all activations
: "${DATA_PATH:=}" # prefix of a .bin/.idx pair, or a blend "0.3 PREFIX 0.7 PREFIX"; empty: mock data
read -rd '' -a data <<<"$DATA_PATH" || true # its words, on several lines, too
: "${TOKENIZER_TYPE:=HuggingFaceTokenizer}"
: "${TOKENIZER_MODEL:=}" # what TOKENIZER_TYPE loads: a folder or a file
: "${DATA_SPLIT:=99,1,0}" # shares of training, validation, test
: "${EVAL_ITERS:=0}"
: "${CHECKPOINT_PATH:=}" # empty: save nothing
: "${SAVE_INTERVAL:=1000}"

# ---------------------------------------------------------------------------------- the rehearsal
: "${DRY_RUN:=0}" # 1: rehearse the launch here, without GPUs, queue or torchrun; docs/rehearsal.md
: "${WORLD_SIZE:=}" # of the rehearsed launch; empty: one model, TP x PP

# --------------------------------------------------------------------------- where it is to run
# From the arguments of the launcher: context-parallel ranks, whether the data are conversations, and what the layers are.
CP=1
SFT=0
PATTERN= # given
ATTENTION='*'
MLP='-'
PREDICTIONS=0
NOT_IN_A_PATTERN=
previous=
for word in "$@"; do
    # As --flag=value, whichever way it was given.
    case $previous in
        --context-parallel-size | --num-layers | --mtp-num-layers | --hybrid-layer-pattern) word=$previous=$word ;;
    esac
    case $word in
        --context-parallel-size=*) CP=${word#*=} ;;
        --num-layers=*) NUM_LAYERS=${word#*=} ;;
        --mtp-num-layers=*) PREDICTIONS=${word#*=} ;;
        --hybrid-layer-pattern=*) PATTERN=${word#*=} ;;
        --multi-latent-attention) ATTENTION=+ ;;
        --num-experts | --num-experts=*) MLP=E ;;
        --moe-layer-freq* | --pipeline-model-parallel-layout*) NOT_IN_A_PATTERN=${word%%=*} ;;
        --sft) SFT=1 ;;
    esac
    previous=$word
done
# Hardware queues of a GPU. Tensor and context parallelism overlap their messages by the order of launches, which one
# queue keeps (Megatron requires it below Blackwell); without them, several queues keep messages from holding up kernels.
if [ -z "${CUDA_DEVICE_MAX_CONNECTIONS:-}" ]; then
    CUDA_DEVICE_MAX_CONNECTIONS=$([ "$TP" = 1 ] && [ "$CP" = 1 ] && echo 32 || echo 1)
fi
# Loading a kernel waits for the GPU, which may be waiting for a message: load all before the first.
: "${CUDA_MODULE_LOADING:=EAGER}"
# Segments of different lengths fragment memory unless the allocator's blocks can grow.
: "${PYTORCH_ALLOC_CONF:=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"
PYTORCH_CUDA_ALLOC_CONF=$PYTORCH_ALLOC_CONF # its name before PyTorch 2.9
: "${OMP_NUM_THREADS:=1}"
export CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS

check_python() {
    find_modules torch megatron.core transformer_engine apex \
        fused_weight_gradient_mlp_cuda fused_layer_norm_cuda scaled_upper_triang_masked_softmax_cuda
    [[ $installed == *" torch "* && $installed == *" megatron.core "* ]] ||
        die "$PYTHON has no torch or no megatron-core: run bash scripts/setup.sh, or set PYTHON."
}

# check_world NODES: check the sizes, set GPUS_PER_NODE if need be, and check that the model can be laid out.
check_world() {
    check_numbers 999999 TP PP CP CHUNKS HIDDEN_SIZE NUM_HEADS MICRO_BATCH_SIZE NUM_MICRO_BATCHES
    check_numbers 9999 NUM_LAYERS
    [ "$PREDICTIONS" = 0 ] || check_numbers 9999 PREDICTIONS
    check_numbers 999999999 SEQ_LENGTH VOCAB_SIZE TRAIN_ITERS SAVE_INTERVAL
    [ "$SEQUENCE_SPLITS" = auto ] || check_numbers 999999999 SEQUENCE_SPLITS
    [ -z "$UNIT_TOKENS" ] || check_numbers 999999999 UNIT_TOKENS
    [[ $EVAL_ITERS =~ ^[0-9]+$ ]] || die "EVAL_ITERS=$EVAL_ITERS is not a number of iterations."
    [ "$EVAL_ITERS" = 0 ] || check_numbers 999999999 EVAL_ITERS
    check_switches DRY_RUN RECOMPUTE
    local model="TP=$TP x PP=$PP"
    [ "$CP" = 1 ] || model+=" x --context-parallel-size $CP"
    [[ $DEVICE == cuda || $DEVICE == cpu ]] || die "DEVICE=$DEVICE is unknown: take cuda or cpu."
    [ -z "$WORLD_SIZE" ] || check_numbers 999999 WORLD_SIZE
    if [ "$DRY_RUN" = 1 ]; then
        : "${WORLD_SIZE:=$((TP * PP * CP))}"
        DP=$((WORLD_SIZE / (TP * PP * CP)))
        ((DP * TP * PP * CP == WORLD_SIZE && DP > 0)) ||
            die "WORLD_SIZE=$WORLD_SIZE is not a multiple of $model: change one of them."
        return
    fi
    if [ -z "${GPUS_PER_NODE:-}" ]; then
        GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-$({ nvidia-smi -L 2>/dev/null || true; } | grep -c ^GPU || true)}
    fi
    [[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] ||
        die "no GPU is visible (GPUS_PER_NODE=$GPUS_PER_NODE): set GPUS_PER_NODE, or try MODEL_SIZE=tiny, which runs on the CPU."
    check_numbers 9999 GPUS_PER_NODE
    local world=$(($1 * GPUS_PER_NODE))
    ((world % (TP * PP * CP) == 0)) ||
        die "$1 node(s) x GPUS_PER_NODE=$GPUS_PER_NODE make $world processes, which is not a multiple of $model: change one of them."
    DP=$((world / (TP * PP * CP)))
}

check_data() {
    local word
    ((${#data[@]})) || return 0
    for word in "${data[@]}"; do
        [[ $word =~ ^[0-9.]+$ || -f $word.idx || $DRY_RUN == 1 || ($SFT == 1 && -f $word) ]] ||
            die "DATA_PATH: there is no $word.idx; seq1f1b preprocess makes it."
    done
    [ -n "$TOKENIZER_MODEL" ] ||
        die "DATA_PATH needs the tokenizer that made the data: set TOKENIZER_MODEL (and TOKENIZER_TYPE)."
}

# ------------------------------------------------------------------------------------- the flags
# Set the array `flags` from the variables above.
make_flags() {
    flags=(
        --device "$DEVICE"
        --tensor-model-parallel-size "$TP"
        --pipeline-model-parallel-size "$PP"
        --use-distributed-optimizer
        --hidden-size "$HIDDEN_SIZE"
        --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH"
        --max-position-embeddings "$SEQ_LENGTH"
        --position-embedding-type rope
        --untie-embeddings-and-output-weights
        --hidden-dropout 0
        --attention-dropout 0
        --micro-batch-size "$MICRO_BATCH_SIZE"
        --global-batch-size $((MICRO_BATCH_SIZE * NUM_MICRO_BATCHES * DP))
        --train-iters "$TRAIN_ITERS"
        --optimizer adam
        --adam-beta1 0.9
        --adam-beta2 0.95
        --lr "$LR"
        --lr-decay-style cosine
        --clip-grad 1.0
        --weight-decay 0.1
        --eval-iters "$EVAL_ITERS"
        --log-interval 1
        --log-throughput
        # Python's garbage collector pauses one rank at a time, and the pipeline waits for each.
        --manual-gc
        --manual-gc-interval 100
    )
    local recomputed_as_one=1 # layers, so that the input of each is kept
    if [ "$SCRIPT" = pretrain_hybrid.py ]; then
        add_pattern
        recomputed_as_one=2 # attention and MLP count as layers
    else
        flags+=(--num-layers "$NUM_LAYERS")
        [ "$CHUNKS" = 1 ] || flags+=(--num-virtual-stages-per-pipeline-rank "$CHUNKS")
    fi
    [ "$MODEL" != hybrid ] || add_hybrid_flags
    if [ "$PIPELINE_SCHEDULE" != megatron ]; then
        flags+=(--pipeline-schedule "$PIPELINE_SCHEDULE")
        if [ -n "$UNIT_TOKENS" ]; then
            flags+=(--unit-tokens "$UNIT_TOKENS" --calculate-per-token-loss)
        else
            flags+=(--sequence-splits "$SEQUENCE_SPLITS" --sequence-split-strategy "$SEQUENCE_SPLIT_STRATEGY")
        fi
    fi
    case $PRECISION in
        bf16) flags+=(--bf16) ;;
        fp32) ;;
        *) die "PRECISION=$PRECISION is unknown: take bf16 or fp32." ;;
    esac
    if ((TP > 1)); then
        flags+=(--sequence-parallel)
    fi
    if [ "$RECOMPUTE" = 1 ]; then
        flags+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers "$recomputed_as_one")
    fi
    if [ "$DEVICE" != cpu ]; then
        add_kernel_flags
    fi
    if ((${#data[@]})); then
        flags+=(--data-path "${data[@]}" --split "$DATA_SPLIT")
        flags+=(--tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL")
    else
        flags+=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
    fi
    if [ -n "$CHECKPOINT_PATH" ]; then
        # A run may go on for longer than it was planned for: its learning rates are those of its new length.
        flags+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "$SAVE_INTERVAL" \
            --override-opt-param-scheduler)
        # Checkpoints of any layout go on in any other.
        flags+=(--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable)
    fi
}

# The layers one by one, with a | between pipeline stages and a / before each predicted token.
add_pattern() {
    [ -z "$PATTERN" ] || return 0
    [ -z "$NOT_IN_A_PATTERN" ] ||
        die "$NOT_IN_A_PATTERN goes with SCRIPT=pretrain_gpt.py; for pretrain_hybrid.py give --hybrid-layer-pattern."
    local stages=$((PP * CHUNKS)) pattern='' layer first
    ((NUM_LAYERS % stages == 0)) ||
        die "NUM_LAYERS=$NUM_LAYERS is not a multiple of PP=$PP x CHUNKS=$CHUNKS: change one, or give --hybrid-layer-pattern."
    for ((layer = 1; layer <= NUM_LAYERS; layer++)); do
        first=$ATTENTION
        [ "$MODEL" = gpt ] || ((layer % 4 == 0)) || first=G
        pattern+=$first$MLP
        ((layer % (NUM_LAYERS / stages) != 0 || layer == NUM_LAYERS)) || pattern+='|'
    done
    for ((layer = 1; layer <= PREDICTIONS; layer++)); do
        pattern+=/$ATTENTION$MLP
    done
    flags+=(--hybrid-layer-pattern "$pattern")
}

# Each layer is a gated delta net or, every fourth, attention, and an MLP. The sizes of heads follow Qwen3-Next: keys as
# wide as the model, values twice.
add_hybrid_flags() {
    local head=$((HIDDEN_SIZE / NUM_HEADS))
    flags+=(
        --swiglu
        --disable-bias-linear
        --linear-num-key-heads "$NUM_HEADS"
        --linear-num-value-heads $((2 * NUM_HEADS))
        --linear-key-head-dim "$head"
        --linear-value-head-dim "$head"
    )
}

# rehearse [ARGUMENTS]: run the training script once, which then plays every pipeline stage.
rehearse() {
    export WORLD_SIZE
    exec "$PYTHON" "$SCRIPT" "${flags[@]}" --dry-run "$@"
}

has() {
    [[ $installed == *" $1 "* ]]
}

# Megatron takes its GPU kernels from Transformer Engine, which also chooses those of attention by what is installed.
# Without it they come from the extensions of NVIDIA apex; Megatron looks for those that are missing unless a flag says
# otherwise. (On a CPU the training script sees to that itself.)
add_kernel_flags() {
    # A rehearsal takes it that the cluster has Transformer Engine.
    if has transformer_engine || [ "$DRY_RUN" = 1 ]; then
        return
    fi
    flags+=(--transformer-impl local --no-rope-fusion)
    has fused_weight_gradient_mlp_cuda || flags+=(--no-gradient-accumulation-fusion)
    has scaled_upper_triang_masked_softmax_cuda || flags+=(--no-masked-softmax-fusion)
    if ! has apex; then
        ((TP == 1)) ||
            die "TP=$TP on GPUs needs Transformer Engine or NVIDIA apex: pip install '.[te]', or set TP=1."
        flags+=(--no-persist-layer-norm)
    elif ! has fused_layer_norm_cuda; then
        die "NVIDIA apex is installed without its extensions: build it with --cpp_ext --cuda_ext, or uninstall it."
    fi
}
