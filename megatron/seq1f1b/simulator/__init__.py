"""What a schedule costs: times from what segments cost, and lowered schedules run on simulated channels."""

from .channels import HangError, execute
from .costs import action_costs
from .measured import is_trace, read_traced_costs, traced_costs

__all__ = ["HangError", "action_costs", "execute", "is_trace", "read_traced_costs", "traced_costs"]
