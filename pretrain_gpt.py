"""Pretrain a GPT: Megatron's own flags, plus those of megatron.seq1f1b (see --help).

pretrain_hybrid.py pretrains hybrid models with the same data, loss and flags.
"""

import time
from collections.abc import Callable
from typing import Any

_PROGRAM_START = time.time()

from megatron.seq1f1b import add_arguments, install, pipeline_config, use_segment_attention, validate

# Before Megatron is imported, which binds the names that are replaced here.
install()

from functools import partial
from types import SimpleNamespace

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# A loss this many times the largest seen so far is reported by --check-for-spiky-loss.
SPIKE = 10

# Flags that upstream leaves without a value, but divides by or looks up.
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}

# Upstream's flags that need another batch than those of GPTDataset and SFTDataset, or another loss.
UNSUPPORTED = dict.fromkeys(("fim_data", "hybrid_context_parallel", "inprocess_restart"), "is not supported here") | {
    "logits_load_dir": "needs another loss than that of this script"
}

# What a stage may need of a batch, and the entries that mark documents in Megatron's packed format.
INPUTS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
DOCUMENTS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def get_batch(data_iterator, micro_batch_size, vp_stage=None):
    """The next (tokens, labels, loss_mask, attention_mask, position_ids), each (micro-batch, s),
    and the PackedSeqParams of a batch in the packed format.

    A stage gets what it needs: the first has no labels, the last no tokens, a middle one nothing
    but the format.
    """
    args = get_args()
    is_packed = in_packed_format(args)
    if not reads_batches(vp_stage):
        return (None,) * 6

    batch = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        check_tokens(batch, args)
        # A blend also has the number of each data set, which Megatron would divide among context-parallel ranks.
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items() if name in INPUTS + DOCUMENTS}
        batch = dict.fromkeys(DOCUMENTS) | batch
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(**stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(**stage),
    )
    if is_packed:
        batch = flatten_batch_for_packed_sequences(batch)
    else:
        batch |= dict.fromkeys(DOCUMENTS)
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        # Our attention exchanges heads, so documents may be divided anywhere.
        use_per_sequence_balancing=args.dataloader_inter_document_masking or pipeline_config().follows_documents,
    )
    inputs = tuple(batch.get(name) for name in INPUTS)
    packed = packed_seq_params(batch) if is_packed else None
    return *inputs, packed


def reads_batches(vp_stage):
    """Whether a stage needs batches: for tokens or labels, or for where documents end, which our schedules tell their
    stages."""
    needs_documents = in_packed_format(get_args()) and not pipeline_config().follows_documents
    return needs_documents or is_first_or_last_pipeline_stage(vp_stage) or predicts_tokens(vp_stage)


def predicts_tokens(vp_stage):
    """Whether a stage has the layers of multi-token prediction, which need the tokens, too."""
    predicting = prediction_layers()
    return mtp_on_this_rank(
        predicting.pipeline_model_parallel_layout, predicting.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def prediction_layers():
    """What Megatron's functions read of the layers of multi-token prediction, with the layout as it parses it."""
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    layout = layout and PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return SimpleNamespace(mtp_num_layers=args.mtp_num_layers or None, pipeline_model_parallel_layout=layout)


def embedding_ranks(ranks):
    """Of the ranks of a pipeline those with the embedding, a copy of it, or the output layer tied to it."""
    predicting = get_mtp_ranks(ranks, prediction_layers())
    tied = () if predicting and get_args().untie_embeddings_and_output_weights else (ranks[-1],)
    return sorted({ranks[0], *predicting, *tied})


def check_tokens(batch, args):
    """Raise ValueError for a token beyond the vocabulary: with tensor parallelism, Megatron would train on without a
    word. The batch is still on the host, where this takes no time."""
    if args.dry_run:  # whose batches hold no values
        return
    highest = max(int(batch[name].max()) for name in ("tokens", "labels"))
    if highest >= args.padded_vocab_size:
        raise ValueError(
            f"the data hold the token {highest}, but the vocabulary ends at {args.padded_vocab_size - 1}; give the "
            "tokenizer that made the data"
        )


def in_packed_format(args):
    """Whether the model gets documents as cumulative lengths, which batches without values lack."""
    has_none = args.dry_run and pipeline_config().follows_documents
    return (args.sft or args.dataloader_inter_document_masking) and not has_none


def packed_seq_params(batch):
    """Where the documents of a flattened batch start, as Megatron's attention takes it."""
    starts = batch["cu_seqlens"][0]
    longest = int(batch["max_seqlen"].max())
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded[0]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def loss_func(loss_mask, output_tensor):
    """Sum of the masked losses, number of tokens that count, and both again for the log."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    check_loss(loss)
    num_tokens = loss_mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def check_loss(loss):
    """Stop at a loss that is not a number and report one that jumps, according to Megatron's flags."""
    args = get_args()
    machine = get_rerun_state_machine()
    checks = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "the loss is NaN", True), (torch.isinf, "the loss is Inf", True)]
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks += [(spiky, "the loss jumped", False)]
    for rejected, message, fatal in checks:
        machine.validate_result(result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=fatal)


def forward_step(data_iterator, model):
    """Run ``model`` on its next batch: its output, and the function from output to loss."""
    args = get_args()
    timers = get_timers()
    straggler = StragglerDetector()
    micro_batch_size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        tokens, labels, loss_mask, attention_mask, position_ids, packing = get_batch(
            data_iterator, micro_batch_size, get_attr_wrapped_model(model, "vp_stage")
        )
    timers("batch-generator").stop()
    is_counted = pipeline_config().follows_documents  # by our schedules, whose middle stages read no batch
    is_first_chunk = get_attr_wrapped_model(model, "vp_stage") in (None, 0)
    if packing is not None and model.training and is_first_chunk and not is_counted:
        update_seqlen_stats_from_cu_seqlens(packing.cu_seqlens_q)  # for the logged FLOPs
    with straggler:
        output = model(
            tokens,
            position_ids,
            attention_mask,
            labels=labels,
            loss_mask=loss_mask,
            packed_seq_params=packing,
        )
    return output, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    """The (train, validation, test) data sets of ``num_samples`` each, on ranks that read data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
        object_storage_cache_path=args.object_storage_cache_path,
    )

    def is_built_here():
        return reads_batches(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    kind = GPTDataset
    if args.sft:
        kind = SFTDataset
    elif args.mock_data:
        kind = MockGPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, config).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


# Tells upstream to call the provider on every rank, not only on the first of a TP group.
train_valid_test_datasets_provider.is_distributed = True


def with_our_arguments(parser):
    # Upstream's check of --attention-backend local demands this value, which its builder refuses.
    parser.set_defaults(spec=["local"])
    return add_arguments(parser)


def main(model_config_from_args: Callable[..., Any], unsupported: dict[str, str]) -> None:
    """Pretrain the model of Megatron's configuration; `unsupported` gives the reason why a flag is not, by name."""
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args(extra_args_provider=with_our_arguments, args_defaults=DEFAULTS)
    if args.spec == ["local"]:
        args.spec = None
    config = validate(args)
    for name, why in (UNSUPPORTED | unsupported).items():
        if getattr(args, name, False):
            raise ValueError(f"--{name.replace('_', '-')} {why}")
    if not (args.mock_data or args.dry_run) and get_blend_and_blend_per_split(args) == (None, None):
        raise ValueError("there are no data; give --data-path, or --mock-data for made-up tokens")
    if in_packed_format(args) and not config.follows_documents and args.transformer_impl == "local":
        raise ValueError(
            "Megatron's own local layers do not take packed documents; add --sequence-splits or "
            "--pipeline-schedule, or use --transformer-impl transformer_engine."
        )
    # A mask takes s² bytes a sequence. Causal attention makes its own, within documents our
    # schedules need none.
    masks_documents = args.reset_attention_mask and not config.follows_documents
    args.create_attention_mask_in_dataloader &= masks_documents

    model_config = model_config_from_args(args)
    if config.wants_segment_attention:
        model_config.pre_wrap_hooks.append(use_segment_attention)

    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main(gpt_config_from_args, {"hybrid_layer_pattern": "makes a hybrid model; use pretrain_hybrid.py"})
