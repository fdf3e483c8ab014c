"""A program's calls of its model: suspended, their arguments cut into segments, the outputs of segments joined."""
