"""The process that Megatron runs in: its rank, its peers, and what is rebound in it."""
