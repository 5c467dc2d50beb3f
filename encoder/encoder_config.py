"""What an encoder is made of: plain sizes and options. Torch-free; families read them from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from encoder.geometry import TowerShape, VisionGeometry
from encoder.packing import Packing

Arithmetic = Literal["float32", "bfloat16"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
ConnectorKind = Literal["pixel_shuffle", "average_pool", "mlp", "gated_mlp"]
NormKind = Literal["layer", "rms"]
PatchTable = Literal["whole", "none", "corners", "centres"]
"""Learned positions of patches: one for each of a square tile's, or no table; or a square one that is
stretched over an image's own grid, corner to corner or with the outer patches' edges on its edges."""
PatchRope = Literal["none", "axial", "alternating"]
"""How queries and keys are turned: by row and by column with all frequencies of half a head each, or with its
frequencies in turns."""


class EncoderConfigError(ValueError):
    """A configuration this encoder can't be built from; the message names the field."""


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A pre-norm vision transformer without its pooling head: SigLIP as it stands, others by its options."""

    width: int
    num_layers: int
    num_heads: int
    intermediate: int  # width of the MLP's hidden layer
    image_size: int  # pixels, square tiles; 0: each image has its own size
    patch_size: int  # pixels
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    norm: NormKind = "layer"
    final_norm: NormKind | None = "layer"
    qkv_bias: bool = True
    qk_norm: bool = False  # an RMS norm over the whole width of q and of k, before the heads
    head_norm: bool = False  # an RMS norm over each head of q and of k
    class_token: bool = False  # in front of the patches, dropped behind the last block
    patch_bias: bool = True
    linear_bias: bool = True  # of attention's output and the MLP
    gated: bool = False  # MLP: activation(gate) * up
    first_norm: NormKind | None = None  # in front of the blocks
    table: PatchTable = "whole"
    rope: PatchRope = "none"
    rope_theta: float = 10_000.0
    table_side: int = 0  # of a table that is stretched
    window: int = 0  # patches per side that see each other alone, in all but the `full_layers`; 0: all do
    full_layers: tuple[int, ...] = ()
    joined_layers: tuple[int, ...] = ()
    """Layers whose outputs, side by side, are the tower's, without a final norm; empty: the last layer's."""

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "intermediate", "patch_size"):
            if getattr(self, name) < 1:
                raise EncoderConfigError(f"tower: {name} must be at least 1")
        if not self.image_size and (self.table == "whole" or self.class_token):
            raise EncoderConfigError("tower: a table of one size and a class token belong to an image_size")
        if (self.table in ("corners", "centres")) != (self.table_side > 0):
            raise EncoderConfigError("tower: table_side belongs to a table that is stretched, which needs it")
        if self.window and (self.class_token or self.window < 0):
            raise EncoderConfigError("tower: windows are of 1 patch or more, and without a class token")
        if self.rope != "none" and self.width // self.num_heads % 4:
            raise EncoderConfigError("tower: heads turned by row and column have a multiple of 4 channels")
        if any(not 0 <= layer < self.num_layers for layer in self.joined_layers):
            raise EncoderConfigError("tower: joined_layers must name its layers")
        if self.joined_layers and self.final_norm:
            raise EncoderConfigError("tower: a final norm belongs to a tower without joined_layers")
        if self.width % self.num_heads:
            raise EncoderConfigError("tower: width must be a multiple of num_heads")
        if self.image_size and self.patch_size > self.image_size:
            raise EncoderConfigError("tower: patch_size must not exceed image_size")
        if self.norm not in get_args(NormKind):
            raise EncoderConfigError(f"tower: norm must be one of {', '.join(get_args(NormKind))}")
        if self.activation not in get_args(Activation):
            raise EncoderConfigError(f"tower: activation must be one of {', '.join(get_args(Activation))}")

    @property
    def out_width(self) -> int:
        """Channels of a patch that the connector reads."""
        return self.width * max(1, len(self.joined_layers))

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Rows of the position table."""
        return self.table_side**2 or self.num_patches + self.class_token


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """How patches become visual tokens of the decoder's width."""

    kind: ConnectorKind
    reduction: int  # patches joined per side
    d_model: int  # the decoder's width
    intermediate: int = 0  # hidden width of the `mlp` and `gated_mlp` kinds
    norm: NormKind | None = None  # `mlp`: over the joined patches; `average_pool`: over the pooled ones
    norm_eps: float = 1e-5
    activation: Activation = "gelu"  # of the `mlp` kind
    bias: bool = True  # of the `average_pool` and `mlp` kinds' linears
    norm_patches: bool = False  # `mlp`: the norm is over each patch, before they are joined
    merged: bool = False  # `mlp`: a linear without bias takes the joined patches to one's width first
    output_scale: float = 1.0  # of visual tokens; folded into the weights by the names' `output_scale`

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConnectorKind):
            raise EncoderConfigError(f"connector: kind must be one of {', '.join(get_args(ConnectorKind))}")
        if self.reduction < 1 or self.d_model < 1:
            raise EncoderConfigError("connector: reduction and d_model must be at least 1")
        if (self.kind in ("mlp", "gated_mlp")) != (self.intermediate > 0):
            raise EncoderConfigError("connector: intermediate belongs to the mlp kinds, which need it")
        if self.norm and self.kind == "pixel_shuffle":
            raise EncoderConfigError("connector: norm belongs to the mlp and average_pool kinds")


@dataclass(frozen=True, slots=True)
class Normalisation:
    """pixel -> (pixel * scale - mean) / std, per channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    tower: TowerConfig
    connector: ConnectorConfig
    normalisation: Normalisation = field(default_factory=Normalisation)
    deepstack: tuple[int, ...] = ()
    """Tower layers whose outputs become further rows beside each visual token, by connectors of their own."""
    packing: Packing | None = None  # of an image's visual tokens, with a newline token that is learned

    def __post_init__(self) -> None:
        if self.deepstack and self.connector.kind != "mlp":
            raise EncoderConfigError("connector: deepstack belongs to the mlp kind")
        if any(not 0 <= layer < self.tower.num_layers for layer in self.deepstack):
            raise EncoderConfigError("connector: deepstack must name layers of the tower")
        if self.packing and (self.deepstack or not self.tower.image_size):
            raise EncoderConfigError("connector: packing belongs to square tiles, without deepstack")
        side = self.geometry.grid_side  # 0 where each image has its own size
        if self.connector.kind != "average_pool" and side % self.connector.reduction:
            raise EncoderConfigError(
                f"connector: {self.connector.kind} at reduction {self.connector.reduction} "
                f"doesn't fit the tower's {side}x{side} patches"
            )

    @property
    def row_width(self) -> int:
        """Channels of a visual token: the decoder's width, once more for each layer of `deepstack`."""
        return self.connector.d_model * (1 + len(self.deepstack))

    @property
    def geometry(self) -> VisionGeometry:
        reduction = self.connector.reduction
        return VisionGeometry(self.tower.image_size, self.tower.patch_size, reduction, self.packing)

    @property
    def shape(self) -> TowerShape:
        """What its FLOPs and bytes follow from."""
        return TowerShape(
            geometry=self.geometry,
            num_layers=self.tower.num_layers,
            width=self.tower.width,
            intermediate=self.tower.intermediate,
            d_model=self.connector.d_model,
            connector=self.connector.kind,
            connector_intermediate=self.connector.intermediate,
            merged=self.connector.merged,
            gated=self.tower.gated,
            extra_positions=int(self.tower.class_token),
            table=self.tower.table_side**2,
            window=self.tower.window,
            full_layers=len(self.tower.full_layers),
            joined_layers=max(1, len(self.tower.joined_layers)),
            row_sets=1 + len(self.deepstack),
        )
