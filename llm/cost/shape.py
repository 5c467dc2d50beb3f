"""What of a decoder decides its bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llm.cost import param_counts
from llm.cost.param_counts import CostError, read
from llm.text_config import ConfigError


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder's sizes. MHA is `num_kv_heads == num_heads`, MQA is 1, GQA lies between."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # width of a query or key
    num_params: int  # all that is held in memory, active or not
    vocab_size: int = 0
    v_head_dim: int = 0  # 0: as head_dim
    intermediate_size: int = 0
    embed_params: int = 0  # looked up and never multiplied: an input table that the head doesn't share
    head_params: int = 0  # multiplied only at positions whose logits are wanted
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0  # one expert's, summed over the layers that have experts
    latent_dim: int = 0  # MLA: width of the cached latent; 0: keys and values are cached
    rope_dim: int = 0  # MLA: width of the cached positional key
    num_sliding_layers: int = 0  # read the last `sliding_window` positions, and keep no others
    sliding_window: int = 0
    keeps_all: bool = False  # but an engine of one pool for all layers keeps every position in each
    num_linear_layers: int = 0  # keep one state of `linear_state` elements, whatever the context
    linear_state: int = 0
    max_positions: int = 0
    known_family: bool = True  # False: parameters counted as Llama's would be

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.d_model, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1 or self.num_params < 1:
            raise CostError("a decoder's sizes must be at least 1")
        if self.num_kv_heads > self.num_heads or self.num_heads % self.num_kv_heads:
            raise CostError("the query heads must be a multiple of the key/value heads")
        if self.num_sliding_layers + self.num_linear_layers > self.num_layers:
            raise CostError("there are more special layers than layers")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], tied_default: bool | None = None, text_type: str = "llama"
    ) -> DecoderShape:
        """From a Hugging Face `config.json`, of a decoder or of a model that holds one.

        tied_default: whether the head is tied where the outer config is silent; None asks the inner one.
        text_type: the decoder's kind where the config doesn't name it.
        Raises CostError if a size is missing or makes no sense.
        """
        text = param_counts.text_config(config, tied_default, text_type)
        try:
            return cls._from_text_config(text)
        except CostError:
            raise
        except ConfigError as error:
            raise CostError(str(error)) from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise CostError("the config has a size that isn't a number above 0") from error

    @classmethod
    def _from_text_config(cls, config: dict[str, Any]) -> DecoderShape:
        counts = param_counts.count_params(config)
        kinds = param_counts.layer_types(config)
        latent = int(config.get("kv_lora_rank") or 0)
        rope = int(read(config, "qk_rope_head_dim")) if latent else 0
        head_dim = (
            int(read(config, "qk_nope_head_dim")) + rope if latent else param_counts.head_dim_of(config)
        )
        num_linear = kinds.count("linear")
        return cls(
            num_layers=int(read(config, "num_hidden_layers")),
            d_model=int(read(config, "hidden_size")),
            num_heads=int(read(config, "num_attention_heads")),
            num_kv_heads=param_counts.num_kv_heads_of(config),
            head_dim=head_dim,
            v_head_dim=int(read(config, "v_head_dim")) if latent else head_dim,
            num_params=counts.total,
            vocab_size=int(read(config, "vocab_size")),
            intermediate_size=int(read(config, "intermediate_size", 0) or 0),
            embed_params=counts.embed,
            head_params=counts.head,
            num_experts=int(read(config, "num_experts", 0)) if counts.expert else 0,
            experts_per_token=int(read(config, "num_experts_per_tok")) if counts.expert else 0,
            expert_params=counts.expert,
            latent_dim=latent,
            rope_dim=rope,
            num_sliding_layers=kinds.count("sliding"),
            sliding_window=int(config.get("sliding_window") or 0) if "sliding" in kinds else 0,
            num_linear_layers=num_linear,
            linear_state=num_linear and _linear_state(config),
            max_positions=int(read(config, "max_position_embeddings", 0)),
            known_family=param_counts.family_of(config)[1],
        )

    def lumped(self) -> DecoderShape:
        """The articles' accounting: every parameter is read in every step and multiplies every token."""
        return replace(self, embed_params=0, head_params=0)

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def num_full_layers(self) -> int:
        return self.num_layers - self.num_sliding_layers - self.num_linear_layers

    @property
    def shared_params(self) -> int:
        """Parameters outside the routed experts."""
        return self.num_params - self.num_experts * self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, its table rows aside."""
        return self.shared_params + self.experts_per_token * self.expert_params


def _linear_state(config: Mapping[str, Any]) -> int:
    """Elements per sequence and layer: one key x value matrix per value head, and the convolution's tail."""
    keys, values = int(read(config, "linear_key_head_dim")), int(read(config, "linear_value_head_dim"))
    value_heads, key_heads = (
        int(read(config, "linear_num_value_heads")),
        int(read(config, "linear_num_key_heads")),
    )
    tail = int(read(config, "linear_conv_kernel_dim", 4)) - 1
    return value_heads * keys * values + tail * (2 * key_heads * keys + value_heads * values)
