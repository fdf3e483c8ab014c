"""The step predicted: a schedule with costs and communication, in simulated time. Start with step.predict."""
