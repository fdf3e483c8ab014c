"""What a step takes, and which configuration is best: costs, the simulator of a lowered schedule, the planner."""
