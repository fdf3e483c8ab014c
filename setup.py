"""megatron-seq1f1b installs beside megatron-core and touches nothing of it."""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-seq1f1b",
    version="0.1.0",
    description="Sequence-level pipeline schedules for Megatron",
    # `megatron` is a namespace: megatron.core and megatron.training belong to megatron-core.
    packages=find_namespace_packages(include=["megatron.seq1f1b", "megatron.seq1f1b.*"]),
    python_requires=">=3.12",
    # NVIDIA apex is used where it is installed; it is not on PyPI.
    install_requires=["torch>=2.6", "megatron-core[training]==0.19.*", "numpy"],
    extras_require={
        "report": ["matplotlib"],
        "test": ["hypothesis", "pytest", "pytest-timeout", "ruff"],
        "te": ["transformer-engine[pytorch]"],
        "flash-attn": ["flash-attn"],
    },
)
