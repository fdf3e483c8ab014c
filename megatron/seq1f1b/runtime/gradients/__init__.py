"""Weights and gradients of data-parallel ranks: when they are reduced, and how they are partitioned."""
