"""Attention of a segment: its layers, what they keep for later segments, rotary positions, heads on other ranks."""
