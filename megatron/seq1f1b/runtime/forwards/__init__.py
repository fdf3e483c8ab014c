"""Forwards of a step, on whole micro-batches, on segments, or beside backwards of others, and their losses."""
