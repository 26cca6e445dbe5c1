"""Our attention inside models of others: Hugging Face transformers, timm, plain PyTorch.

Each module here imports its library, so none is imported with the package:
``import leaner_kernels.adapters.timm``. ``flash_attn`` needs none: it has flash-attention's names.
"""
