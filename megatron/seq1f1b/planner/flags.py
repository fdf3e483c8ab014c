"""A configuration as the flags of pretrain_gpt.py, to be pasted behind it."""

from ..costs.training_setup import TrainingSetup
from .space import Candidate


def flags(candidate: Candidate) -> list[str]:
    """In groups of a flag and its value, model and batch included."""
    setup, model = candidate.setup, candidate.setup.model
    pairs: dict[str, object] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--num-attention-heads": model.num_heads,
        "--seq-length": setup.sequence_length,
        "--micro-batch-size": setup.micro_batch_size,
        "--global-batch-size": setup.global_batch_size,
        "--tensor-model-parallel-size": setup.tensor_parallel,
        "--pipeline-model-parallel-size": setup.pipeline_parallel,
    }
    words = [f"{name} {value}" for name, value in pairs.items()]
    if model.num_kv_heads:
        words.append(f"--group-query-attention --num-query-groups {model.num_kv_heads}")
    if model.is_gated:
        words.append("--swiglu")
    words += ["--untie-embeddings-and-output-weights", "--bf16"]
    if setup.context_parallel > 1:
        words.append(f"--context-parallel-size {setup.context_parallel} --cp-comm-type a2a")
    if setup.sequence_parallel:
        words.append("--sequence-parallel")
    if setup.distributed_optimizer:
        words.append("--use-distributed-optimizer")
    if setup.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif setup.recompute == "selective":
        words.append("--recompute-granularity selective")
    words += _layers(setup)
    if setup.pipeline_parallel > 1:
        words.append(f"--pipeline-schedule {setup.family}")
        words.append(f"--sequence-splits {len(setup.segments)}")
        if len(setup.segments) > 1:
            words.append(f"--sequence-split-strategy {candidate.strategy}")
    return words


def _layers(setup: TrainingSetup) -> list[str]:
    chunks = setup.placement.num_chunks
    if chunks > 1:
        return [f"--num-virtual-stages-per-pipeline-rank {chunks}"]
    if len(set(setup.layers_per_stage)) > 1:
        return [f"--decoder-last-pipeline-num-layers {setup.layers_per_stage[-1]}"]
    return []
