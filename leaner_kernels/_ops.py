"""The namespace of the operators. The kernels hub puts a file of its own in this place."""

import torch

ops = torch.ops.leaner_kernels


def add_op_namespace_prefix(op_name: str) -> str:
    """Return an operator's full name."""
    return f"leaner_kernels::{op_name}"
