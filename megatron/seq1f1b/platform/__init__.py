"""Megatron where something is missing: without a GPU, and without Transformer Engine."""
