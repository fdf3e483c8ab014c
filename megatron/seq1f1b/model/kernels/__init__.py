"""Attention kernels: what a kernel must offer, and which one serves a layer.

A kernel computes causal attention of a segment to its whole prefix by one `AttentionRule`. `KernelChoice` finds the
fastest for the rule, the device, the type and the head sizes; `WithSink` gives a kernel's softmax a sink;
`keep_documents_apart` confines a kernel to the documents of packed sequences; `QueryRuns` runs it on some of the
queries of a segment.
"""

from ..documents import Documents
from .choice import KernelChoice
from .documents_apart import DocumentsApart
from .documents_packed import DocumentsPacked
from .interface import AttentionRule, CumulativeLengths, Gradients, Kernel, PackedKernel, Saved
from .query_runs import QueryRuns
from .sink import WithSink

__all__ = [
    "AttentionRule",
    "CumulativeLengths",
    "DocumentsApart",
    "DocumentsPacked",
    "Gradients",
    "Kernel",
    "KernelChoice",
    "PackedKernel",
    "QueryRuns",
    "Saved",
    "WithSink",
    "keep_documents_apart",
]


def keep_documents_apart(kernel: Kernel, documents: Documents) -> Kernel:
    """`kernel`, within each of the documents: in one call if it can, else in a call for each."""
    if isinstance(kernel, PackedKernel):
        return DocumentsPacked(kernel, documents)
    return DocumentsApart(kernel, documents)
