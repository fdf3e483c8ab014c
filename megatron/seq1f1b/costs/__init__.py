"""What a training step costs: sizes of a model, FLOPs, machines, times, memory, and the step predicted.

Predictions start with simulator.predict, those of a launch at its start with run_costs.RunCosts.
"""
