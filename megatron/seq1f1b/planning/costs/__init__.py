"""Sizes of a model, FLOPs, machines, times and memory. Start with stage_costs, stage_times and step_memory."""
