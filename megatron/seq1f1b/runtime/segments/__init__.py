"""How the micro-batches of a step are cut into segments, and packed anew into units."""
