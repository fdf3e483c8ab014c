"""The timings behind `seq1f1b profile`: one transformer layer, the embedding and the head on segments of any length."""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from .. import cpu

if not torch.cuda.is_available():
    cpu.activate()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from ..model import (  # noqa: E402
    Segment,
    SegmentContext,
    WeightGradientStore,
    attach,
    compute_loss_in_pieces,
    defer_weight_gradients,
)
from ..model.kv_cache import KVCache  # noqa: E402
from ..planning.costs import Measurement, ModelShape  # noqa: E402


class Bench:
    """A model of one layer, with inputs of any length."""

    def __init__(self, args: argparse.Namespace, shape: ModelShape) -> None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.batch, self.repeats = args.micro_batch_size, args.repeats
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if args.bf16 or self.device.type == "cuda" else torch.float32
        self.shape = shape
        config = TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.num_kv_heads,
            kv_channels=shape.head_dim,
            gated_linear_unit=shape.is_gated,
            activation_func=torch.nn.functional.silu if shape.is_gated else torch.nn.functional.gelu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=self.dtype,
            bf16=self.dtype is torch.bfloat16,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            add_bias_linear=False,
        )
        # One position more than --seq-length, for the segment that follows the measured one.
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            shape.vocab_size,
            args.seq_length + 1,
            position_embedding_type="rope",
        ).to(self.device)
        self.context = SegmentContext()
        self.weight_gradients = WeightGradientStore()
        attach([self.model], self.context)
        compute_loss_in_pieces([self.model], self.batch * args.seq_length)

    @property
    def name(self) -> str:
        """The device and the precision."""
        is_cuda = self.device.type == "cuda"
        device = torch.cuda.get_device_name() if is_cuda else f"CPU, {torch.get_num_threads()} thread(s)"
        return f"{device}, {self.dtype}"

    def close(self) -> None:
        """To be called once all is measured."""
        dist.destroy_process_group()

    def layer(self, length: int, prefix: int) -> Measurement:
        """One transformer layer on `length` tokens after `prefix`, as in a sequence that goes on after them."""
        end = prefix + length
        segment = Segment(0, 1, prefix, end, end + 1)
        following = Segment(0, 2, end, end + 1, end + 1)
        block, rotary = self.model.decoder.layers[0], self.model.rotary_pos_emb

        def run(part: Segment) -> Callable[[], torch.Tensor]:
            hidden = self._random(part.length)
            with self.context.running(part, True):
                positions = rotary(part.length)
            return lambda: block(hidden, attention_mask=None, rotary_pos_emb=positions)[0]

        measured, after = run(segment), run(following)

        def prepare() -> None:
            """Earlier keys and values: random, since what memory happens to hold can be slow to multiply."""
            self.context.clear()
            attention = block.self_attention.core_attention
            keys = self._random(end, self.shape.num_kv_heads or self.shape.num_heads, self.shape.head_dim)
            with self.context.running(segment, True):
                self.context.cache(attention, lambda: KVCache(end + 1)).write(0, end, keys, keys)

        def follow() -> None:
            """Run the backward of the next segment, which comes first and leaves gradients for this one."""
            with self.context.running(following, True):
                after().sum().backward()

        return self._time(length, prefix, segment, measured, prepare, follow)

    def embedding(self, length: int) -> Measurement:
        tokens = torch.randint(self.shape.vocab_size, (self.batch, length), device=self.device)
        return self._time(length, 0, None, lambda: self.model.embedding(tokens, None))

    def head(self, length: int) -> Measurement:
        hidden = self._random(length)
        labels = torch.randint(self.shape.vocab_size, (self.batch, length), device=self.device)

        def run() -> torch.Tensor:
            logits, _ = self.model.output_layer(self.model.decoder.final_layernorm(hidden))
            return self.model.compute_language_model_loss(labels, logits)

        return self._time(length, 0, None, run)

    def _random(self, length: int, *sizes: int) -> torch.Tensor:
        sizes = sizes or (self.shape.hidden_size,)
        return torch.randn(length, self.batch, *sizes, device=self.device, dtype=self.dtype, requires_grad=True)

    def _time(
        self,
        length: int,
        prefix: int,
        segment: Segment | None,
        forward: Callable[[], torch.Tensor],
        prepare: Callable[[], None] = lambda: None,
        follow: Callable[[], None] = lambda: None,
    ) -> Measurement:
        """The medians over the repeats; the first run is a warm-up."""
        times: list[tuple[float, float, float]] = []
        left = self.weight_gradients
        with defer_weight_gradients(left, [self.model]):
            for _ in range(self.repeats + 1):
                prepare()
                self.context.segment = segment
                seconds_forward, output = self._clock(forward)
                self.context.segment = None
                with left.collecting("following"):
                    follow()
                gradient = torch.randn_like(output)
                self.context.segment = segment
                with left.collecting("measured"):
                    seconds, _ = self._clock(lambda output=output, gradient=gradient: output.backward(gradient))
                seconds_weight, _ = self._clock(lambda: left.compute("measured"))
                self.context.segment = None
                times.append((seconds_forward, seconds + seconds_weight, seconds_weight))
                left.clear()
        self.context.clear()
        return Measurement(length, prefix, *(statistics.median(each) for each in zip(*times[1:], strict=True)))

    def _clock(self, work: Callable[[], torch.Tensor | None]) -> tuple[float, torch.Tensor | None]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, result
