"""The process that Megatron runs in: its rank, its peers, and its patches."""
