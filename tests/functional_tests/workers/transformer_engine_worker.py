"""What our attention leaves of the names in a checkpoint of Transformer Engine's layers, on one rank."""

import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from functional_tests.equality.layout import Layout, build  # noqa: E402
from functional_tests.equality.models import Model  # noqa: E402
from megatron.seq1f1b.model import use_segment_attention  # noqa: E402

if __name__ == "__main__":
    dist.init_process_group("gloo")
    chunks = build(Model(transformer_engine="unfused"), Layout())
    before = chunks[0].state_dict()
    use_segment_attention(chunks)
    gone = before.keys() - chunks[0].state_dict().keys()
    assert chunks[0].state_dict().keys() <= before.keys()
    # All but that of its own fp8 state, which holds nothing without fp8.
    assert gone and all(name.endswith(".core_attention._extra_state") for name in gone), gone
    assert all(before[name] is None or before[name].numel() == 0 for name in gone)
    print("equal")
