"""Models of transformers and timm before and after an adapter."""
