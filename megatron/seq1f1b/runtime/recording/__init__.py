"""Times and memory of the actions of a step, and the files of traces."""
