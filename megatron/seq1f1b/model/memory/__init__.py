"""What saves memory: the host, losses and logits in pieces, weight gradients that wait."""
