"""What work takes: the sizes of a model, FLOPs, devices, and the times of segments, by formula or measured.

Start with stage_costs (what a segment costs on a stage) and step_memory (what a step holds).
"""
