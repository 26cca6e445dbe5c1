"""Benchmarks: every kernel against every peer, checked before it is timed.

Commands lie here, a subject's cases, peers and benchmarks in its folder: ``attention``,
``cross_entropy``, ``kappa``, ``networks``, ``adapters``. ``harness`` checks and times them,
``pages`` renders what they found, ``gpu_model`` runs compiled kernels without a GPU.
"""
