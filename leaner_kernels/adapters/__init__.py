"""Adapters to models of other libraries: Hugging Face transformers, timm, plain PyTorch.

Each module imports its library, so that the package imports none of them: use
``import leaner_kernels.adapters.timm``. ``flash_attn`` needs no library: it provides the names of
flash-attention. Nor does ``sdpa``, which puts our kernels behind PyTorch's own function.
"""
