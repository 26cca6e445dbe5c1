"""One folder an op: the public function, its specification, its kernels."""

from leaner_kernels.ops import (  # noqa: F401 - define the operators that are registered below
    attention,
    covariance,
    nystrom,
    outlook,
    window,
)
from leaner_kernels.ops._flops import register as _register_flops
from leaner_kernels.ops._imports import after_import as _after_import
from leaner_kernels.ops._sharding import register as _register_sharding

_after_import("torch.utils.flop_counter", _register_flops)
_after_import("torch.distributed.tensor", _register_sharding)
