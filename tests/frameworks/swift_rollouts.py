"""What ms-swift's GRPO needs on a CPU: a stub in place of the server that answers prompts, and a reward.

Its trainer gets the answers, their rewards and advantages by its own code. The weights do not go to a server.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.seq1f1b.process.patches import Patch, patched

LENGTHS = range(4, 40)  # of answers, in tokens
VOCABULARY = 128


class Answers:
    """A client of a server, which answers a prompt alike in every training."""

    enable_lora = False
    enable_multi_turn = False
    use_gym_env = False

    def get_engine_type(self) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def infer(self, infer_requests: Sequence[Any], request_config: Any) -> list[Any]:
        """One answer for each request; those of equal prompts differ."""
        from swift.infer_engine.protocol import (
            ChatCompletionResponse,
            ChatCompletionResponseChoice,
            ChatMessage,
            RolloutOutput,
            UsageInfo,
        )

        outputs = []
        asked: Counter[str] = Counter()
        for request in infer_requests:
            prompt = str(request.messages)
            draw = Random(f"{prompt}, {asked[prompt]} times before")
            asked[prompt] += 1
            tokens = [draw.randrange(4, VOCABULARY) for _ in range(draw.choice(LENGTHS))]
            message = ChatMessage("assistant", " ".join(map(str, tokens)))
            choice = ChatCompletionResponseChoice(0, message, "stop", token_ids=tokens)
            usage = UsageInfo(0, len(tokens), len(tokens))
            outputs.append(RolloutOutput(response=ChatCompletionResponse("stub", [choice], usage)))
        return outputs


def evenness(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward: the share of even numbers in each answer."""
    shares = []
    for answer in completions:
        numbers = [int(word) for word in answer.split() if word.isdigit()]
        shares.append(sum(number % 2 == 0 for number in numbers) / max(1, len(numbers)))
    return shares


def broadcast(objects: list[Any], from_process: int) -> list[Any]:
    dist.broadcast_object_list(objects, src=from_process)
    return objects


def attention(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    qkv_format: str = "sbhd",
    cu_seqlens_q: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Transformer Engine's attention by PyTorch, where a program calls its model beside a step: of [s, b, h, d] with a
    mask, True where hidden, or of packs [t, h, d]."""
    if qkv_format == "thd":
        tokens = torch.arange(len(query))
        document = torch.searchsorted(cu_seqlens_q, tokens, right=True)
        attention_mask = (document[:, None] != document) | (tokens[:, None] < tokens)
        heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    else:
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
    output = scaled_dot_product_attention(*heads, attn_mask=~attention_mask, scale=self.softmax_scale, enable_gqa=True)
    output = output.permute(2, 0, 1, 3).flatten(2)
    return output.flatten(0, 1) if qkv_format == "thd" else output


@contextmanager
def answered_by_a_stub() -> Iterator[None]:
    """Answer the prompts of a training by a stub."""
    from swift.megatron.trainers import utils
    from swift.rewards import orms

    trainers = "swift.megatron.trainers"
    rollouts = f"{trainers}.rollout_mixin"
    no_server = "there is no server"
    local = "Accelerate's gathers nothing on a CPU"
    attention_of_te = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    patches = [
        Patch("swift.megatron.pipelines.train.rlhf.MegatronRLHF._prepare_vllm_client", lambda _: Answers(), no_server),
        Patch(f"{rollouts}.MegatronRolloutMixin._move_model_to_vllm", lambda _: None, no_server),
        Patch(f"{rollouts}.is_vllm_available", lambda: True, no_server),
        Patch(f"{rollouts}.check_vllm_version_ge", lambda _: False, no_server),
        Patch(f"{rollouts}.broadcast_object_list", broadcast, local),
        Patch(f"{trainers}.grpo_trainer.broadcast_object_list", broadcast, local),
        Patch(f"{trainers}.utils.hf_gather", partial(utils.gather, group=dist.group.WORLD), local),
        Patch(f"{trainers}.utils.hf_gather_object", partial(utils.gather_object, group=dist.group.WORLD), local),
        Patch(f"{attention_of_te}.DotProductAttention.forward", attention, "it has none for a CPU"),
    ]
    orms["evenness"] = lambda *_, **__: evenness
    with patched(patches):
        yield
