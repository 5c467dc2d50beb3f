"""The SigLIP towers that open_clip names, as plain sizes: a gateway counts tokens without torch or timm.

Source: open_clip's model_configs/*.json and the timm models they name; a test compares every entry.
"""

from __future__ import annotations

from encoder.encoder_config import Activation, EncoderConfigError, TowerConfig

# (width, layers, heads, intermediate)
_SIZES = {
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "SO400M": (1152, 27, 16, 4304),
    "gopt": (1536, 40, 16, 6144),
}
# open_clip's name: (size, patch, image, activation)
_TOWERS: dict[str, tuple[str, int, int, Activation]] = {
    "ViT-B-16-SigLIP": ("B", 16, 224, "gelu"),
    "ViT-B-16-SigLIP-256": ("B", 16, 256, "gelu"),
    "ViT-B-16-SigLIP-384": ("B", 16, 384, "gelu"),
    "ViT-B-16-SigLIP-512": ("B", 16, 512, "gelu"),
    "ViT-B-16-SigLIP-i18n-256": ("B", 16, 256, "gelu"),
    "ViT-B-16-SigLIP2": ("B", 16, 224, "gelu"),
    "ViT-B-16-SigLIP2-256": ("B", 16, 256, "gelu"),
    "ViT-B-16-SigLIP2-384": ("B", 16, 384, "gelu"),
    "ViT-B-16-SigLIP2-512": ("B", 16, 512, "gelu"),
    "ViT-B-32-SigLIP2-256": ("B", 32, 256, "gelu_tanh"),
    "ViT-L-16-SigLIP-256": ("L", 16, 256, "gelu"),
    "ViT-L-16-SigLIP-384": ("L", 16, 384, "gelu"),
    "ViT-L-16-SigLIP2-256": ("L", 16, 256, "gelu"),
    "ViT-L-16-SigLIP2-384": ("L", 16, 384, "gelu"),
    "ViT-L-16-SigLIP2-512": ("L", 16, 512, "gelu_tanh"),
    "ViT-SO400M-14-SigLIP": ("SO400M", 14, 224, "gelu"),
    "ViT-SO400M-14-SigLIP-378": ("SO400M", 14, 378, "gelu"),
    "ViT-SO400M-14-SigLIP-384": ("SO400M", 14, 384, "gelu"),
    "ViT-SO400M-14-SigLIP2": ("SO400M", 14, 224, "gelu"),
    "ViT-SO400M-14-SigLIP2-378": ("SO400M", 14, 378, "gelu"),
    "ViT-SO400M-16-SigLIP-i18n-256": ("SO400M", 16, 256, "gelu_tanh"),
    "ViT-SO400M-16-SigLIP2-256": ("SO400M", 16, 256, "gelu_tanh"),
    "ViT-SO400M-16-SigLIP2-384": ("SO400M", 16, 384, "gelu_tanh"),
    "ViT-SO400M-16-SigLIP2-512": ("SO400M", 16, 512, "gelu_tanh"),
    "ViT-gopt-16-SigLIP2-256": ("gopt", 16, 256, "gelu_tanh"),
    "ViT-gopt-16-SigLIP2-384": ("gopt", 16, 384, "gelu_tanh"),
}


def open_clip_names() -> tuple[str, ...]:
    return tuple(sorted(_TOWERS))


def open_clip_tower(name: str) -> TowerConfig:
    """Raises EncoderConfigError, which lists the known names, for any other."""
    if name not in _TOWERS:
        raise EncoderConfigError(f"open_clip tower must be one of {', '.join(open_clip_names())}")
    size, patch, image, activation = _TOWERS[name]
    width, layers, heads, intermediate = _SIZES[size]
    return TowerConfig(width, layers, heads, intermediate, image, patch, activation, norm_eps=1e-6)
