"""Arguments as Megatron parses and validates them, with our flags."""

import argparse

from megatron.seq1f1b.arguments import add_arguments

MEGATRON = dict(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=16384,
    num_attention_heads=32,
    kv_channels=128,
    padded_vocab_size=50304,
    seq_length=16384,
    tensor_model_parallel_size=1,
    sequence_parallel=False,
    distributed_backend="gloo",
    bf16=False,
    fp16=False,
    transformer_impl="local",
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=None,
    global_batch_size=12,
    micro_batch_size=2,
    data_parallel_size=2,
    step_batch_size_schedule=None,
    moe_router_topk=2,
    moe_ffn_hidden_size=None,
    moe_shared_expert_intermediate_size=None,
    moe_layer_freq=1,
)


def parsed(*flags, **megatron):
    namespace = argparse.Namespace(**{**MEGATRON, **megatron})
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags, namespace)
