"""A configuration as the flags of pretrain_gpt.py."""

from collections.abc import Iterator

from ..planning.costs import Experts, ModelShape
from ..planning.planner import Candidate


def model_flags(model: ModelShape, sequence_length: int) -> list[str]:
    """The model, in 16 bit and without dropout: each item is a flag with its values."""
    words = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_heads}",
        f"--kv-channels {model.head_dim}",
    ]
    if model.num_kv_heads:
        words.append(f"--group-query-attention --num-query-groups {model.num_kv_heads}")
    if model.is_gated:
        words.append("--swiglu --disable-bias-linear")
    if model.experts is not None:
        words += _expert_flags(model, model.experts)
    return [
        *words,
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type rope",
        f"--max-position-embeddings {sequence_length}",
        "--hidden-dropout 0",
        "--attention-dropout 0",
        "--bf16",
    ]


def _expert_flags(model: ModelShape, experts: Experts) -> list[str]:
    words = [
        f"--num-experts {experts.total} --moe-router-topk {experts.active}",
        f"--moe-ffn-hidden-size {experts.ffn_hidden_size}",
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall",
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3",
    ]
    if experts.shared_ffn_hidden_size:
        words.append(f"--moe-shared-expert-intermediate-size {experts.shared_ffn_hidden_size}")
    if len(model.expert_layers) < model.num_layers:
        pattern = ",".join(str(int(layer in model.expert_layers)) for layer in range(model.num_layers))
        words.append(f"--moe-layer-freq [{pattern}]")
    return words


def decided_flags(candidate: Candidate) -> list[str]:
    """All that the planner decides: each item is a flag with its values."""
    setup = candidate.setup
    words = [
        f"--seq-length {setup.sequence_length}",
        f"--tensor-model-parallel-size {setup.tensor_parallel}",
        f"--pipeline-model-parallel-size {setup.pipeline_parallel}",
        f"--micro-batch-size {setup.micro_batch_size}",
        f"--global-batch-size {setup.global_batch_size}",
        "--use-distributed-optimizer",
    ]
    if setup.overlaps_data_parallel:
        words.append("--overlap-grad-reduce --overlap-param-gather")
    if setup.sequence_parallel:
        words.append("--sequence-parallel")
    if setup.context_parallel > 1:
        words.append(f"--context-parallel-size {setup.context_parallel} --cp-comm-type a2a")
    if setup.model.experts is not None:
        words.append(f"--expert-model-parallel-size {setup.expert_parallel} --expert-tensor-parallel-size 1")
    if setup.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return [*words, *_layers(candidate), *_schedule(candidate)]


def _layers(candidate: Candidate) -> Iterator[str]:
    placement, layers = candidate.setup.placement, candidate.setup.layers_per_stage
    if placement.num_chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
    elif len(set(layers)) > 1:
        yield f"--decoder-first-pipeline-num-layers {layers[0]}"
        yield f"--decoder-last-pipeline-num-layers {layers[-1]}"


def _schedule(candidate: Candidate) -> Iterator[str]:
    setup = candidate.setup
    if setup.pipeline_parallel == 1:
        return
    yield f"--pipeline-schedule {setup.family}"
    if len(setup.segments) > 1:
        yield f"--sequence-splits {len(setup.segments)}"
        yield f"--sequence-split-strategy {candidate.strategy}"
