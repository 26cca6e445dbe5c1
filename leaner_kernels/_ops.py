"""The namespace of the operators."""

import torch

ops = torch.ops.leaner_kernels


def add_op_namespace_prefix(op_name: str) -> str:
    """Return an operator's full name."""
    return f"leaner_kernels::{op_name}"
