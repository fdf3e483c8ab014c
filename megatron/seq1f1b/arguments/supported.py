"""The table of features that our schedules do not support, checked at start-up, and written into docs/compatibility.md
by tools/compatibility.py."""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from ..schedule import splitting_families
from .conditions import (
    Condition,
    Settings,
    above,
    all_of,
    ends_without_experts,
    has_faulty_triton,
    has_layers,
    has_mamba_kernels,
    has_old_linear_attention,
    has_recent_transformer_engine,
    has_recipe_of_kitchen,
    heads_are_unequal,
    is_any,
    is_on_gpu,
    is_on_gpu_here,
    is_on_hopper_here,
    on,
    other_than,
    packs_documents,
    predicts_before_the_loss,
    repeats_embeddings_on_a_rank,
    sees_later_tokens,
    ties_embeddings,
    without,
)

_SPLITTING = ", ".join(f"`{name}`" for name in splitting_families() if name != "auto")


class OurFeature(Enum):
    """Our features that exclude some feature of Megatron."""

    EVERY_RUN = "with Megatron's own schedules, too"
    MEGATRONS_OWN = "with Megatron's own schedules"
    ANY_SCHEDULE = "with any schedule of ours"
    SEGMENTS = "with segments"
    SPLIT_BACKWARDS = f"with {_SPLITTING}, files with W"
    V_CHUNKS = "with --pipeline-placement v"
    OFFLOAD = "with --offload-activations"
    PARTITIONED_STATE = "with --partition-state"
    PAIRS = "with --overlap-moe-expert-parallel-comm and a schedule of ours"
    SEGMENTS_OF_TOKENS = "with --segment-tokens"
    UNITS = "with --unit-tokens"


class Unsupported(NamedTuple):
    """A row of the table: the feature and the two other parts of the sentence that the user reads, and the condition
    under which the feature is on."""

    feature: str
    because: str
    way_out: str
    when: Condition

    def holds(self, settings: Settings) -> bool:
        """Whether the feature is on in these settings."""
        return self.when(settings)


def setting_of(flag: str) -> str:
    """The name of a Megatron flag among the settings of a run."""
    name = flag.removeprefix("--").replace("-", "_")
    return {
        "output_logit_dtype": "logit_dtype",
        "fp8_format": "fp8",
        "fp4_format": "fp4",
        "use_nccl_ub": "nccl_ub",
    }.get(name, name)


# The number of tokens that share a scale, for each --fp8-recipe that scales in blocks.
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "blockwise": 128})


def _rows(features: Mapping[str, Condition], because: str, way_out: str) -> tuple[Unsupported, ...]:
    """Features, each with its condition, that share a reason and a way out."""
    return tuple(Unsupported(feature, because, way_out, when) for feature, when in features.items())


UNSUPPORTED: Mapping[OurFeature, tuple[Unsupported, ...]] = {
    OurFeature.EVERY_RUN: (
        *_rows(
            {
                "--mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --save": all_of(
                    on("mtp_num_layers"), ties_embeddings, above("pipeline_model_parallel_size", 1), on("save")
                ),
                "--mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --load": all_of(
                    on("mtp_num_layers"), ties_embeddings, above("pipeline_model_parallel_size", 1), on("load")
                ),
            },
            because="has two weights of one name in Megatron's checkpoints",
            way_out="add --untie-embeddings-and-output-weights",
        ),
        *_rows(
            {
                "--pipeline-model-parallel-layout with copies of the embedding in several chunks of a rank": all_of(
                    on("pipeline_model_parallel_layout"), repeats_embeddings_on_a_rank
                )
            },
            because="leaves ranks that wait for one another in Megatron, or copies that differ",
            way_out=(
                "lay out multi-token prediction on the stage of the loss, or on a rank without embedding and "
                "tied output"
            ),
        ),
        *_rows(
            {
                "--full-validation without --multiple-validation-sets": all_of(
                    on("full_validation"), without(on("multiple_validation_sets"))
                )
            },
            because="ends in an error in Megatron's first evaluation",
            way_out="add --multiple-validation-sets",
        ),
        *_rows(
            {
                (
                    "--full-validation with --eval-micro-batch-size above 1 and --pipeline-model-parallel-size above 1"
                ): all_of(
                    on("full_validation"), above("eval_micro_batch_size", 1), above("pipeline_model_parallel_size", 1)
                )
            },
            because="reads one sequence at a time in Megatron, whatever the size of a micro-batch between stages",
            way_out="use --eval-micro-batch-size 1",
        ),
    ),
    OurFeature.MEGATRONS_OWN: (
        *_rows(
            {"--pipeline-placement v": is_any("pipeline_placement", "v")},
            because="is not for Megatron's own schedules",
            way_out="add --pipeline-schedule auto",
        ),
        *_rows(
            {
                "--recompute-keeps-attention": on("recompute_keeps_attention"),
                "--offload-activations": on("offload_activations"),
                "--offload-layers-leaving": on("offload_layers_leaving"),
            },
            because="is not for Megatron's own schedules",
            way_out="add --sequence-splits or --pipeline-schedule 1f1b",
        ),
        *_rows(
            {"--partition-state": on("partition_state")},
            because="is not for Megatron's own schedules",
            way_out="add --pipeline-schedule breadth-first",
        ),
        *_rows(
            {
                "--pipeline-trace with --overlap-moe-expert-parallel-comm": all_of(
                    on("pipeline_trace"), on("overlap_moe_expert_parallel_comm")
                )
            },
            because="times forwards and backwards, which then run at once",
            way_out="drop one of the two",
        ),
    ),
    OurFeature.ANY_SCHEDULE: (
        *_rows(
            {"--cuda-graph-impl": on("cuda_graph_impl")},
            because="follows the order of Megatron's own schedules",
            way_out="use --cuda-graph-impl none",
        ),
        *_rows(
            {"--delay-wgrad-compute": on("delay_wgrad_compute")},
            because="follows the order of Megatron's own schedules, where it postpones weight gradients within a layer",
            way_out="use --pipeline-schedule zb-h1, which postpones them behind later actions, beside pairs, too",
        ),
        *_rows(
            {
                "--moe-paged-stash": on("moe_paged_stash"),
                "--hybrid-context-parallel": on("hybrid_context_parallel"),
            },
            because="follows the order of Megatron's own schedules",
            way_out="drop --pipeline-schedule and --sequence-splits to run those",
        ),
        *_rows(
            {"--fine-grained-activation-offloading": on("fine_grained_activation_offloading")},
            because="follows the order of Megatron's own schedules",
            way_out="use --offload-activations",
        ),
        *_rows(
            {"--defer-embedding-wgrad-compute": on("defer_embedding_wgrad_compute")},
            because="pairs activations and gradients in forward order, but segments go backward in reverse",
            way_out="drop it",
        ),
        *_rows(
            {"--cpu-offloading-num-layers": on("cpu_offloading_num_layers")},
            because="keeps one forward until its backward, and the next would take its place",
            way_out="use --offload-activations",
        ),
        *_rows(
            {"--inprocess-restart": on("inprocess_restart")},
            because="trains again in a process whose pipeline has failed",
            way_out="drop it, and let torchrun or Slurm start the job again",
        ),
        *_rows(
            {
                "--tensor-parallel-num-weight-shards above --tensor-model-parallel-size": above(
                    "tensor_parallel_num_weight_shards", "tensor_model_parallel_size"
                ),
                "--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size": above(
                    "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
                ),
                "--use-megatron-fsdp": on("use_megatron_fsdp"),
                "--use-torch-fsdp2": on("use_torch_fsdp2"),
            },
            because="is not tested with our schedules",
            way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
        ),
        # Of Megatron-LM's main, for GPUs and Transformer Engine only, or beside tensors that our messages do not have.
        *_rows(
            {
                "--enable-mhc-connections": on("enable_mhc_connections"),
                "--moe-use-grouped-tensor": on("moe_use_grouped_tensor"),
                "--moe-dispatch-fwd-dtype mxfp8": is_any("moe_dispatch_fwd_dtype", "mxfp8"),
                "--moe-combine-bwd-dtype mxfp8": is_any("moe_combine_bwd_dtype", "mxfp8"),
                "--output-logit-dtype": on("logit_dtype"),
            },
            because="is not tested with our schedules",
            way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
        ),
        *_rows(
            {
                "--pipeline-schedule-file with --pipeline-schedule": all_of(
                    on("pipeline_schedule_file"), on("pipeline_schedule")
                )
            },
            because="is a whole schedule",
            way_out="drop one of the two",
        ),
        *_rows(
            {
                "--pipeline-schedule-file with --step-batch-size-schedule": all_of(
                    on("pipeline_schedule_file"), on("step_batch_size_schedule")
                )
            },
            because="is for one number of micro-batches",
            way_out="drop one of the two",
        ),
        *_rows(
            {
                "--recompute-keeps-attention without --recompute-granularity full": all_of(
                    on("recompute_keeps_attention"), without(is_any("recompute_granularity", "full"))
                )
            },
            because="is of no use, since no whole layer is repeated",
            way_out="add that, or drop it",
        ),
    ),
    OurFeature.SEGMENTS: (
        *_rows(
            {
                "--context-parallel-size above 1 with --cp-comm-type other than a2a, all_gather": all_of(
                    above("context_parallel_size", 1), other_than("cp_comm_type", "a2a", "all_gather")
                )
            },
            because="moves the keys and values of the whole prefix for every segment",
            way_out="use --cp-comm-type a2a, or all_gather where there are more ranks than attention heads",
        ),
        *_rows(
            {
                "--cp-comm-type a2a with unequal numbers of attention heads": all_of(
                    is_any("cp_comm_type", "a2a"), heads_are_unequal
                )
            },
            because="cannot divide those of a tensor-parallel rank by --context-parallel-size",
            way_out="use --cp-comm-type all_gather",
        ),
        *_rows(
            {
                "--moe-expert-capacity-factor": on("moe_expert_capacity_factor"),
                "--moe-expert-rank-capacity-factor": on("moe_expert_rank_capacity_factor"),
            },
            because="makes the experts of a token depend on the tokens beside it, which a segment changes",
            way_out="drop it",
        ),
        *_rows(
            {
                "--moe-router-load-balancing-type sinkhorn, quantile_balancing": is_any(
                    "moe_router_load_balancing_type", "sinkhorn", "quantile_balancing"
                )
            },
            because="makes the experts of a token depend on the tokens beside it, which a segment changes",
            way_out="use --moe-router-load-balancing-type aux_loss",
        ),
        *_rows(
            {"--moe-enable-routing-replay": on("moe_enable_routing_replay")},
            because="replays the routes of whole micro-batches",
            way_out="drop it",
        ),
        *_rows(
            {"--mtp-use-repeated-layer": on("mtp_use_repeated_layer")},
            because="runs one layer several times on the same segment, so that its keys would overwrite one another",
            way_out="drop it",
        ),
        *_rows(
            {"--mtp-hsm": on("mtp_hsm")},
            because="shifts hidden states by a token, of which a segment has only its own",
            way_out="drop --sequence-splits to keep sequences whole",
        ),
        *_rows(
            {
                "--experimental-attention-variant": on("experimental_attention_variant"),
                "--heterogeneous-layers-config-path": on("heterogeneous_layers_config_path"),
            },
            because="is not cut into segments yet",
            way_out="drop --sequence-splits to keep sequences whole",
        ),
        *_rows(
            {"--position-embedding-type mrope": is_any("position_embedding_type", "mrope")},
            because="is not cut into segments yet",
            way_out="use --position-embedding-type rope",
        ),
        *_rows(
            {
                "--recompute-granularity selective with --recompute-modules gdn_norm_out": all_of(
                    is_any("recompute_granularity", "selective"), is_any("recompute_modules", "gdn_norm_out")
                )
            },
            because="is not cut into segments yet",
            way_out="use --recompute-granularity full, or drop it",
        ),
        *_rows(
            {
                "--recompute-granularity selective with --recompute-modules mlp and biases": all_of(
                    is_any("recompute_granularity", "selective"),
                    is_any("recompute_modules", "mlp"),
                    on("add_bias_linear"),
                )
            },
            because=(
                "never ends its first backward in Megatron, since a bias that a recomputed part returns "
                "becomes its result"
            ),
            way_out="add --disable-bias-linear",
        ),
        *_rows(
            {"--hybrid-layer-pattern with D (sparse attention)": all_of(on("hybrid_layer_pattern"), has_layers("D"))},
            because="chooses among the keys of whole sequences",
            way_out="use * for attention",
        ),
        *_rows(
            {"--window-size with tokens after the query": all_of(on("window_size"), sees_later_tokens)},
            because="lets a segment attend to later ones, which have not been computed",
            way_out="give 0 as its second number",
        ),
        *_rows(
            {
                "--allow-ambiguous-pad-tokens with --reset-attention-mask": all_of(
                    on("allow_ambiguous_pad_tokens"), on("reset_attention_mask")
                )
            },
            because="erases the tokens that end documents where padding is the same token",
            way_out="drop --allow-ambiguous-pad-tokens",
        ),
        *_rows(
            {
                "--logits-save-dir": on("logits_save_dir"),
                "--save-tokens-per-expert-interval": on("save_tokens_per_expert_interval"),
                "--moe-routing-trace-path": on("moe_routing_trace_path"),
            },
            because="would log every segment as a micro-batch",
            way_out="drop it, or --sequence-splits",
        ),
        *_rows(
            {
                "--save-activations-interval": on("save_activations_interval"),
                "--save-dgrads-interval": on("save_dgrads_interval"),
            },
            because="would save only the last segment",
            way_out="drop it",
        ),
        *_rows(
            {
                "--qk-clip": on("qk_clip"),
                "--log-max-attention-logit": on("log_max_attention_logit"),
            },
            because="needs the largest logit of each head, which takes another product of all queries and keys",
            way_out="drop it",
        ),
        *_rows(
            {
                "--fp8-format with --fp8-recipe other than mxfp8, blockwise": all_of(
                    on("fp8"), other_than("fp8_recipe", "mxfp8", "blockwise")
                ),
                "--te-precision-config-file": on("te_precision_config_file"),
                "quant_recipe": on("quant_recipe"),
                "kitchen_config_file": on("kitchen_config_file"),
                "a recipe of kitchen": has_recipe_of_kitchen,
            },
            because="may scale by the largest value of whole tensors, but a segment has only a part",
            way_out="use --fp8-recipe mxfp8 or blockwise, whose scales are those of a few tokens",
        ),
        *_rows(
            {
                "--fp8-format with --context-parallel-size above 1": all_of(
                    on("fp8"), above("context_parallel_size", 1)
                ),
                "--fp8-format with --num-experts": all_of(on("fp8"), on("num_experts")),
            },
            because="scales tokens together that lie in different segments",
            way_out="drop --fp8-format",
        ),
        *_rows(
            {
                "fp8_dot_product_attention": on("fp8_dot_product_attention"),
                "fp8_multi_head_attention": on("fp8_multi_head_attention"),
            },
            because="computes attention in 8 bits, which the kernels for segments cannot",
            way_out="drop it",
        ),
        *_rows(
            {"--fp4-format": on("fp4")},
            because="scales by the largest value of a micro-batch, too",
            way_out="use --fp8-format",
        ),
        *_rows(
            {
                "--attention-backend fused with --attention-dropout and --window-size on a GPU": all_of(
                    is_any("attention_backend", "fused"), on("attention_dropout"), on("window_size"), is_on_gpu
                ),
                "--attention-backend fused with --attention-dropout and packed documents on a GPU": all_of(
                    is_any("attention_backend", "fused"), on("attention_dropout"), packs_documents, is_on_gpu
                ),
            },
            because="has no kernel in Transformer Engine",
            way_out="drop --attention-dropout, or use --attention-backend flash",
        ),
        *_rows(
            {
                "--attention-backend fused on this GPU without Transformer Engine 2.20 or later": all_of(
                    is_any("attention_backend", "fused"), is_on_gpu_here, without(has_recent_transformer_engine)
                )
            },
            because="needs it",
            way_out="install transformer-engine, or use --attention-backend flash",
        ),
        *_rows(
            {
                (
                    "--moe-flex-dispatcher-backend hybridep with packed documents without "
                    "--moe-hybridep-pad-uneven-dispatch-inputs"
                ): all_of(
                    is_any("moe_flex_dispatcher_backend", "hybridep"),
                    packs_documents,
                    without(on("moe_hybridep_pad_uneven_dispatch_inputs")),
                )
            },
            because="needs equally many tokens on every rank, but each cuts its segments by its own documents",
            way_out="give that flag, or use deepep",
        ),
        *_rows(
            {
                (
                    "--hybrid-layer-pattern with G on this Hopper GPU and "
                    "flash-linear-attention before 0.5 and Triton 3.4.0 to 3.7.0"
                ): all_of(
                    on("hybrid_layer_pattern"),
                    has_layers("G"),
                    is_on_hopper_here,
                    has_old_linear_attention,
                    has_faulty_triton,
                )
            },
            because="has wrong gradients",
            way_out="install flash-linear-attention 0.5.2 or later, with Triton 3.7.1 or later or with tilelang",
        ),
        *_rows(
            {
                "--hybrid-layer-pattern with M on this GPU without mamba-ssm, causal-conv1d": all_of(
                    on("hybrid_layer_pattern"), has_layers("M"), is_on_gpu_here, without(has_mamba_kernels)
                )
            },
            because="needs their kernels",
            way_out="install mamba-ssm and causal-conv1d",
        ),
    ),
    OurFeature.SPLIT_BACKWARDS: (
        *_rows(
            {
                "--moe-grouped-gemm with biases and --transformer-impl transformer_engine": all_of(
                    on("moe_grouped_gemm"), on("add_bias_linear"), is_any("transformer_impl", "transformer_engine")
                )
            },
            because=(
                "computes the gradients of biases sometimes with those of weights, sometimes with those of inputs"
            ),
            way_out="give --disable-bias-linear, or use a schedule without W such as 1f1b",
        ),
        *_rows(
            {"--moe-shared-expert-overlap": on("moe_shared_expert_overlap")},
            because=(
                "computes shared experts on a stream of their own, and nothing would wait for their weight gradients"
            ),
            way_out="drop it",
        ),
        *_rows(
            {"--overlap-dispatch-backward-with-experts-wgrad": on("overlap_dispatch_backward_with_experts_wgrad")},
            because="computes weight gradients in the backward of inputs",
            way_out="drop it, or use a schedule without W such as 1f1b",
        ),
        *_rows(
            {"--tp-comm-overlap": on("tp_comm_overlap")},
            because="exchanges beside the products of weight gradients, which are computed later",
            way_out="drop it, or use a schedule without W such as 1f1b",
        ),
    ),
    OurFeature.V_CHUNKS: (
        *_rows(
            {
                "--pipeline-model-parallel-layout with multi-token prediction before the loss": all_of(
                    on("pipeline_model_parallel_layout"), predicts_before_the_loss
                )
            },
            because="keeps a second embedding on a rank of its own",
            way_out="lay them out on one stage, or use --pipeline-placement looped",
        ),
        *_rows(
            {"--ckpt-format torch": is_any("ckpt_format", "torch")},
            because="keeps chunks by the rank that holds them",
            way_out="use --ckpt-format torch_dist",
        ),
    ),
    OurFeature.OFFLOAD: (
        *_rows(
            {
                "--overlap-grad-reduce with fused gradient accumulation": all_of(
                    on("overlap_grad_reduce"), on("gradient_accumulation_fusion")
                )
            },
            because="needs marks of parameters, which autograd does not give back where activations move",
            way_out="give --no-gradient-accumulation-fusion",
        ),
    ),
    OurFeature.PARTITIONED_STATE: (
        *_rows(
            {"--optimizer other than adam, sgd": other_than("optimizer", "adam", "sgd")},
            because="keeps parameters in an order of its own",
            way_out="use --optimizer adam",
        ),
        *_rows(
            {"a run without --use-distributed-optimizer": without(on("use_distributed_optimizer"))},
            because="keeps the state of the optimizer whole",
            way_out="add --use-distributed-optimizer",
        ),
        *_rows(
            {"--num-distributed-optimizer-instances above 1": above("num_distributed_optimizer_instances", 1)},
            because="reduces gradients once more among the instances",
            way_out="drop it",
        ),
        *_rows(
            {
                "--use-precision-aware-optimizer": on("use_precision_aware_optimizer"),
                "--optimizer-cpu-offload": on("optimizer_cpu_offload"),
            },
            because="holds weights of its own that the shares do not follow yet",
            way_out="drop it",
        ),
        *_rows(
            {"--overlap-param-gather-with-optimizer-step": on("overlap_param_gather_with_optimizer_step")},
            because="gathers before a chunk is at work",
            way_out="drop it",
        ),
        *_rows(
            {
                "--fp8-param-gather": on("fp8_param_gather"),
                "--fp4-param-gather": on("fp4_param_gather"),
            },
            because="keeps weights in few bits, which are not divided into shares yet",
            way_out="drop it",
        ),
        *_rows(
            {"--use-nccl-ub": on("nccl_ub")},
            because="registers buffers, which then cannot be freed",
            way_out="drop it",
        ),
        *_rows(
            {"--optimizer-cuda-graph": on("optimizer_cuda_graph")},
            because="replays one step in memory that the next has freed",
            way_out="drop it",
        ),
        *_rows(
            {
                "--ddp-param-name-patterns-for-fp32-local-accumulation": on(
                    "ddp_param_name_patterns_for_fp32_local_accumulation"
                )
            },
            because="sums gradients in memory of its own, which is not divided into shares yet",
            way_out="drop it",
        ),
        *_rows(
            {"--save-wgrads-interval": on("save_wgrads_interval")},
            because="reads gradients when none are whole",
            way_out="drop it",
        ),
        *_rows(
            {
                "--save-params-interval": on("save_params_interval"),
                "--moe-routing-trace-dump-weights": on("moe_routing_trace_dump_weights"),
                "--log-params-norm": on("log_params_norm"),
                "--check-weight-hash-across-dp-replicas-interval": on("check_weight_hash_across_dp_replicas_interval"),
            },
            because="reads weights when none are gathered",
            way_out="drop it",
        ),
        *_rows(
            {"--ckpt-format other than torch_dist": other_than("ckpt_format", "torch_dist")},
            because="saves weights on some ranks only, and these would wait for the others",
            way_out="use --ckpt-format torch_dist",
        ),
    ),
    OurFeature.PAIRS: (
        *_rows(
            {"--offload-layers-leaving": on("offload_layers_leaving")},
            because="moves layers one by one, which Megatron's schedule plans keep until all have run",
            way_out="drop it, so that units move as a whole",
        ),
        *_rows(
            {
                "--pipeline-schedule gpipe, breadth-first": is_any("pipeline_schedule", "gpipe", "breadth-first"),
                "--pipeline-schedule auto": is_any("pipeline_schedule", "auto"),
            },
            because="has no forward beside a backward",
            way_out="use --pipeline-schedule 1f1b or zb-h1",
        ),
        *_rows(
            {
                "a run without --expert-model-parallel-size above 1": without(above("expert_model_parallel_size", 1)),
                "--hybrid-layer-pattern with E": on("hybrid_layer_pattern"),
            },
            because="has no exchange of experts that Megatron can run beside other layers",
            way_out="drop --overlap-moe-expert-parallel-comm",
        ),
        *_rows(
            {
                "a run without --moe-token-dispatcher-type alltoall, flex": without(
                    is_any("moe_token_dispatcher_type", "alltoall", "flex")
                )
            },
            because="exchanges the tokens of all experts in the midst of their compute",
            way_out="add --moe-token-dispatcher-type alltoall",
        ),
        *_rows(
            {"--moe-flex-dispatcher-backend ncclep": is_any("moe_flex_dispatcher_backend", "ncclep")},
            because="keeps the tokens of one exchange at a time",
            way_out="use --moe-flex-dispatcher-backend deepep or hybridep",
        ),
        *_rows(
            {"--moe-layer-freq with a dense last layer": ends_without_experts},
            because="leaves out the norm behind the last layer in Megatron's schedule plans",
            way_out="drop --overlap-moe-expert-parallel-comm",
        ),
        *_rows(
            {"--recompute-granularity full": is_any("recompute_granularity", "full")},
            because="repeats layers as a whole, where nothing can run beside their exchanges",
            way_out="give --recompute-granularity selective with --recompute-modules layernorm mlp moe",
        ),
        *_rows(
            {
                "--moe-shared-expert-overlap": on("moe_shared_expert_overlap"),
                "--overlap-dispatch-backward-with-experts-wgrad": on("overlap_dispatch_backward_with_experts_wgrad"),
                "--ep-overlap-early-attn-memory-release": on("ep_overlap_early_attn_memory_release"),
            },
            because="has an order of its own for the parts of a layer",
            way_out="drop it",
        ),
        *_rows(
            {"--mtp-num-layers above 1": above("mtp_num_layers", 1)},
            because="is beyond Megatron's schedule plans",
            way_out="give 1",
        ),
        *_rows(
            {
                "--sequence-parallel with --hidden-dropout": all_of(on("sequence_parallel"), on("hidden_dropout")),
                "--sequence-parallel with --attention-dropout": all_of(
                    on("sequence_parallel"), on("attention_dropout")
                ),
            },
            because="drops the same on every tensor-parallel rank in Megatron's schedule plans",
            way_out="give 0 for the dropout",
        ),
        *_rows(
            {
                "--fp8-format": on("fp8"),
                "--fp4-format": on("fp4"),
                "--partition-state": on("partition_state"),
            },
            because="does not follow two units at once yet",
            way_out="drop one of the two",
        ),
    ),
    OurFeature.SEGMENTS_OF_TOKENS: (
        *_rows(
            {
                "--sequence-splits": on("sequence_splits"),
                "--sequence-split-file": on("sequence_split_file"),
                "--sequence-split-strategy": on("sequence_split_strategy"),
                "--sequence-split-profile": on("sequence_split_profile"),
                "--unit-tokens": on("unit_tokens"),
            },
            because="cuts by another rule",
            way_out="drop one of the two",
        ),
        *_rows(
            {"--pipeline-schedule-file": on("pipeline_schedule_file")},
            because="is an order for one number of segments, and each micro-batch has its own",
            way_out="use --pipeline-schedule 1f1b",
        ),
        *_rows(
            {"--tp-comm-overlap": on("tp_comm_overlap")},
            because="has buffers for segments of one length",
            way_out="drop it, or take --sequence-splits",
        ),
        *_rows(
            {
                "--moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1": all_of(
                    is_any("moe_token_dispatcher_type", "allgather"), above("expert_model_parallel_size", 1)
                )
            },
            because="needs equally many tokens on every rank, but segments differ in length",
            way_out="use --moe-token-dispatcher-type alltoall",
        ),
    ),
    OurFeature.UNITS: (
        *_rows(
            {
                "--sequence-splits": on("sequence_splits"),
                "--sequence-split-file": on("sequence_split_file"),
                "--sequence-split-strategy": on("sequence_split_strategy"),
                "--sequence-split-profile": on("sequence_split_profile"),
            },
            because="is for sequences of one length, and --unit-tokens decides by itself where to cut",
            way_out="drop one of the two",
        ),
        *_rows(
            {
                "--pipeline-schedule auto": is_any("pipeline_schedule", "auto"),
                "--pipeline-schedule-file": on("pipeline_schedule_file"),
            },
            because="is an order for one number of segments, and units give each step another",
            way_out="use --pipeline-schedule 1f1b",
        ),
        *_rows(
            {"a run without packed documents": without(packs_documents)},
            because="has sequences of one length",
            way_out=(
                "add --sft, --reset-attention-mask or --dataloader-inter-document-masking, or take --sequence-splits"
            ),
        ),
        *_rows(
            {"a run without --calculate-per-token-loss": without(on("calculate_per_token_loss"))},
            because="weighs a token by its micro-batch, which units change",
            way_out="add --calculate-per-token-loss",
        ),
        *_rows(
            {"--mtp-num-layers": on("mtp_num_layers")},
            because="weighs predictions by their micro-batch, which units change",
            way_out="take --sequence-splits instead of --unit-tokens",
        ),
        *_rows(
            {
                "--micro-batch-size above 1": above("micro_batch_size", 1),
                "--eval-micro-batch-size above 1": above("eval_micro_batch_size", 1),
            },
            because="puts several sequences side by side, where units put them one after the other",
            way_out="give 1",
        ),
        *_rows(
            {"--tp-comm-overlap": on("tp_comm_overlap")},
            because="has buffers for segments of one length, which units do not have",
            way_out="drop it",
        ),
        *_rows(
            {
                "--moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1": all_of(
                    is_any("moe_token_dispatcher_type", "allgather"), above("expert_model_parallel_size", 1)
                )
            },
            because="needs equally many tokens on every rank, but units differ in length",
            way_out="use --moe-token-dispatcher-type alltoall",
        ),
        *_rows(
            {
                "--moe-router-load-balancing-type global_aux_loss": is_any(
                    "moe_router_load_balancing_type", "global_aux_loss"
                )
            },
            because=("waits in each forward for one of every replica, but units give replicas unequal numbers of them"),
            way_out="use --moe-router-load-balancing-type aux_loss",
        ),
    ),
}


def unsupported(settings: Settings, uses: Collection[OurFeature]) -> Iterator[Unsupported]:
    """The features in `settings` that do not go with these uses."""
    for use in OurFeature:  # in the order of the table, whatever that of `uses`
        if use in uses:
            yield from (row for row in UNSUPPORTED[use] if row.holds(settings))


def first_unsupported(settings: Settings, uses: Collection[OurFeature]) -> str | None:
    """One sentence, without its full stop, on the first feature that is not supported; None if all are."""
    for row in unsupported(settings, uses):
        return f"{row.feature} {row.because}; {row.way_out}"
    return None
