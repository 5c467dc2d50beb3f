"""Lab 4: what an image costs, from tiling rule to concurrent conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from encoder.geometry import Grid, TowerShape, VisionGeometry
from llm.cost import (
    Bound,
    Chunk,
    CostError,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    StepTime,
    kv_bytes,
    max_batch,
    prefill_time,
    step_time,
)
from preprocess.types import Detail, TileGrid, TilingRule
from vlm.plan.render import binary, count, duration, gigabytes, grid, pairs, percent


@dataclass(frozen=True, slots=True)
class ImageFigures:
    """One image of a request; exact, nothing is estimated."""

    width: int
    height: int
    rows: int
    cols: int
    tiles: int
    patch_tokens: int
    visual_tokens: int
    prompt_tokens: int  # with the markers that the prompt's form adds
    kv_bytes: int  # of them, in whole blocks


@dataclass(frozen=True, slots=True)
class ImagePlan:
    images: int
    tiles: int
    patch_tokens: int
    visual_tokens: int
    text_tokens: int
    prompt_tokens: int
    preprocess_s: float  # on a CPU
    encode_s: float
    prefill_s: float
    ttft_s: float
    vision_share: float  # of TTFT: preprocessing and tower
    warm_ttft_s: float  # the next question about the same images
    text_ttft_s: float  # the same question without an image
    kv_per_request_bytes: int
    kv_visual_bytes: int
    kv_text_bytes: int
    visual_over_text: float  # KV of the images over KV of the text
    conversations: int  # that fit on the accelerator
    binds: Bound
    per_image: tuple[ImageFigures, ...] = ()
    span_tokens: int = 0  # of a tile that one step takes whole; 0: a prompt may be cut anywhere
    span_step_s: float = 0.0  # longest such step beside one decode: the gap that running answers see
    decode_step_s: float = 0.0  # the same step without it


def with_pooling(tower: TowerShape, pooled: int) -> TowerShape:
    """The tower with a connector that joins `pooled` patches, a square number. Raises CostError."""
    side = round(pooled**0.5)
    if side < 1 or side * side != pooled:
        raise CostError("pooling joins a square of patches: 1, 4, 9, 16")
    return replace(tower, geometry=replace(tower.geometry, reduction=side))


def with_encoder(tower: TowerShape, image_size: int, patch_size: int) -> TowerShape:
    """The tower at another tile and patch size, in pixels. Raises CostError."""
    if not 0 < patch_size <= image_size:
        raise CostError("a patch must be at least 1 pixel and at most a tile")
    return replace(tower, geometry=VisionGeometry(image_size, patch_size, tower.geometry.reduction))


def encode_time(
    tower: TowerShape, machine: Machine, images: Sequence[Grid], precision: Precision | None = None
) -> StepTime:
    """Tower and connector over the images' tiles in one batch."""
    precision = precision or Precision()
    rate = machine.flops(precision.compute_bits) * machine.tower_efficiency
    return StepTime(
        compute_s=sum(
            tower.flops(image) / rate + tower.elements(image) * machine.tower_element_s for image in images
        ),
        bandwidth_s=machine.stream_seconds(tower.weight_bytes(precision.weight_bytes)),
        overhead_s=machine.tower_call_s + machine.tower_overhead_s * tower.num_layers,
    )


def costs_of_images(
    sizes: Sequence[tuple[int, int]],
    rule: TilingRule,
    tower: TowerShape,
    decoder: DecoderShape,
    detail: Detail = "auto",
    kv_element_bytes: float = 2,
    markers: Callable[[TileGrid], int] = lambda grid: 0,
    block_size: int = 1,
) -> tuple[ImageFigures, ...]:
    """`sizes` are (width, height) after EXIF orientation, as the header probe gives them.

    `markers`: tokens that the prompt's form adds around an image's tiles.
    """
    costs = []
    for width, height in sizes:
        tiles = rule.grid(width, height, detail)
        visual = tower.geometry.rows(tiles)
        prompt = visual + markers(tiles)
        costs.append(
            ImageFigures(
                width=width,
                height=height,
                rows=tiles.rows,
                cols=tiles.cols,
                tiles=tiles.num_tiles,
                patch_tokens=tower.geometry.num_patches(tiles),
                visual_tokens=visual,
                prompt_tokens=prompt,
                kv_bytes=kv_bytes(decoder, prompt, kv_element_bytes, block_size),
            )
        )
    return tuple(costs)


def plan_image(
    decoder: DecoderShape,
    tower: TowerShape,
    machine: Machine,
    images: Sequence[Grid],
    text_tokens: int = 30,
    precision: Precision | None = None,
    marker_tokens: int = 0,
    block_size: int = 1,
    per_image: tuple[ImageFigures, ...] = (),
    whole_spans: bool = False,
) -> ImagePlan:
    """A request with these images. The three stages are counted one after another.

    `marker_tokens`: what the prompt's form adds around tiles. Text alone takes at least the weights' read.
    `whole_spans`: the decoder takes a tile's visual tokens in one step, as they see each other.
    """
    precision = precision or Precision()
    num_tiles = sum(image.num_tiles for image in images)
    visual = sum(tower.geometry.rows(image) for image in images)
    text = text_tokens + marker_tokens
    prompt = visual + text
    megapixels = sum(cost.width * cost.height for cost in per_image) / 1e6
    preprocess_s = num_tiles * machine.preprocess_s_per_tile + megapixels * machine.preprocess_s_per_megapixel
    encode = encode_time(tower, machine, images, precision)
    prefill = prefill_time(decoder, machine, prompt, 0, precision)
    encode_s = encode.seconds if num_tiles else 0.0
    ttft = preprocess_s + encode_s + prefill.seconds
    fits = max_batch(decoder, machine, prompt, precision, Parallel(), block_size)
    kv_visual = kv_bytes(decoder, visual, precision.kv_bytes)
    kv_text = kv_bytes(decoder, text_tokens, precision.kv_bytes)
    largest: Bound = "compute" if preprocess_s > max(encode_s, prefill.seconds) else prefill.binds
    if encode_s > max(preprocess_s, prefill.seconds):
        largest = encode.binds
    span = max(tower.geometry.rows(image) // image.num_tiles for image in images) if whole_spans else 0
    decode = Chunk(1, prompt)
    beside = [Chunk(span, prompt - span, 0), decode] if span else []
    return ImagePlan(
        images=len(images),
        tiles=num_tiles,
        patch_tokens=sum(tower.geometry.num_patches(image) for image in images),
        visual_tokens=visual,
        text_tokens=text_tokens,
        prompt_tokens=prompt,
        preprocess_s=preprocess_s,
        encode_s=encode_s,
        prefill_s=prefill.seconds,
        ttft_s=ttft,
        vision_share=(preprocess_s + encode_s) / ttft,
        warm_ttft_s=prefill_time(decoder, machine, prompt, prompt - text_tokens, precision).seconds,
        text_ttft_s=prefill_time(decoder, machine, text_tokens, 0, precision).seconds,
        kv_per_request_bytes=kv_bytes(decoder, prompt, precision.kv_bytes, block_size),
        kv_visual_bytes=kv_visual,
        kv_text_bytes=kv_text,
        visual_over_text=kv_visual / kv_text,
        conversations=fits,
        binds="capacity" if not fits else largest,
        per_image=per_image,
        span_tokens=span,
        span_step_s=step_time(decoder, machine, beside, precision).seconds if span else 0.0,
        decode_step_s=step_time(decoder, machine, [decode], precision).seconds,
    )


def _span_rows(plan: ImagePlan) -> list[tuple[str, str]]:
    if not plan.span_tokens:
        return []
    stretch = plan.span_step_s / plan.decode_step_s
    return [
        (
            "longest gap of others",
            f"{duration(plan.span_step_s)}, {stretch:.3g} decodes: {plan.span_tokens} tokens in one step",
        )
    ]


def render_image(plan: ImagePlan, title: str, notes: Sequence[str] = ()) -> str:
    rows = [
        ("patch tokens", f"{plan.patch_tokens:,} ({plan.tiles} tiles, {plan.images} images)"),
        ("visual tokens", f"{plan.visual_tokens:,}"),
        ("prompt tokens", f"{plan.prompt_tokens:,}"),
        ("TTFT", duration(plan.ttft_s)),
        ("  preprocess (CPU)", duration(plan.preprocess_s)),
        ("  vision tower", duration(plan.encode_s)),
        ("  prefill", duration(plan.prefill_s)),
        ("vision share of TTFT", percent(plan.vision_share)),
        ("TTFT, next question", duration(plan.warm_ttft_s)),
        *_span_rows(plan),
        ("KV per request", f"{gigabytes(plan.kv_per_request_bytes)} ({binary(plan.kv_per_request_bytes)})"),
        ("concurrent conversations", count(plan.conversations)),
        (
            "vs. text-only prompt",
            f"{count(plan.visual_over_text)}x its KV, {plan.ttft_s / plan.text_ttft_s:.3g}x its TTFT",
        ),
        ("binds", plan.binds),
    ]
    assumed = "stages in sequence on an idle machine; a floor, not a measurement"
    text = pairs(title, rows, [*notes, assumed])
    if not plan.per_image:
        return text
    table = [
        (
            f"{c.width}x{c.height}",
            f"{c.rows}x{c.cols}",
            str(c.tiles),
            f"{c.visual_tokens:,}",
            f"{c.prompt_tokens:,}",
            f"{c.kv_bytes:,}",
        )
        for c in plan.per_image
    ]
    return text + "\n" + grid(("image", "grid", "tiles", "visual tokens", "prompt", "KV bytes"), table)
