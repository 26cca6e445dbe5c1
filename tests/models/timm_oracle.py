"""timm's VisionTransformer with heads of a chosen width, and what it computes: the oracle."""

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer


def timm_vit(*, head_dim: int = 64, **kwargs) -> VisionTransformer:
    """timm's own model. It only takes a class as ``attn_layer``, and splits without a width."""

    class FixedWidthAttention(Attention):
        def __init__(self, *args, **attention_kwargs):
            super().__init__(*args, attn_head_dim=head_dim, **attention_kwargs)

    return VisionTransformer(attn_layer=FixedWidthAttention, **kwargs)


def logits_and_gradients(model: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits, the gradient of every parameter and of the images, for one random loss."""
    images = images.clone().requires_grad_()
    logits = model(images)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(logits.shape, generator=generator).to(logits)
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "images": images.grad, **gradients}
