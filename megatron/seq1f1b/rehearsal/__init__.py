"""A launch rehearsed on one machine without a GPU: its real code on tensors without values or memory."""

from .command import check_environment, is_asked_for, patches

__all__ = ["check_environment", "is_asked_for", "patches"]
