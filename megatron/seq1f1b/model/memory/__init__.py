"""Saving memory: activations on the host, losses and logits in pieces, weight gradients that wait."""
