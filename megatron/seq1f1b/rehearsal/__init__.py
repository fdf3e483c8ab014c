"""A launch rehearsed on one machine without a GPU: its real code on tensors without values or memory."""

from .command import is_asked_for, patches, prepare

__all__ = ["is_asked_for", "patches", "prepare"]
