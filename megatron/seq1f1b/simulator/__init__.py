"""What a schedule costs: times from what segments cost, and lowered schedules run on simulated channels."""

from .channels import HangError, execute
from .costs import action_costs

__all__ = ["HangError", "action_costs", "execute"]
