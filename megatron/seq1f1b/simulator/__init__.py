"""What a schedule costs: lowered schedules run on simulated channels."""

from .channels import HangError, execute

__all__ = ["HangError", "execute"]
