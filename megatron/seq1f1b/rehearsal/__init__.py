"""A launch rehearsed on one machine without a GPU: its real code on tensors without values or memory."""

from .command import patches, prepare
