"""`vlm plan image`, `schedule` and `fleet`: commands about images and about load over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from encoder.geometry import TYPICAL_IMAGE, Grid, TowerShape
from llm.cost import CostError
from preprocess.own_size import capped
from preprocess.types import TileGrid
from vlm.cli.images import check_stdin, naming, read_image
from vlm.cli.options import Json, MaxPixels
from vlm.config import ACCELERATOR_PIXELS, CPU_PIXELS
from vlm.headers import read_header
from vlm.plan.catalog import PlannedModel, load_machine, load_model
from vlm.plan.labs import image_lab as images
from vlm.plan.plan_options import (
    Cache,
    Device,
    Exact,
    Plot,
    StoredKv,
    StoredWeights,
    Weights,
    at_least_one,
    decoder_of,
    precision_of,
    show,
    stored,
)
from vlm.plan.simulation import fleet as fleets
from vlm.plan.simulation.outcome import ScheduleReport, render_reports, report
from vlm.plan.simulation.prefix_routing import FleetLoad
from vlm.plan.simulation.schedule import POLICIES, Policy, Rules, simulate
from vlm.plan.simulation.workload import ARTICLE_REQUESTS, Arrival, Lengths, poisson_arrivals, read_arrivals
from vlm.spec import BLOCK_SIZE, ModelSpec

VisionModel = Annotated[
    str,
    typer.Option("--model", help="7b-mha, a smolvlm-* preset, 'default', or a SmolVLM checkpoint folder."),
]


def _tower(model: PlannedModel) -> TowerShape:
    if model.tower is None:
        raise CostError(f"{model.name} has no vision tower; presets with one: 7b-mha, smolvlm-256m, default")
    return model.tower


def _probe_sizes(paths: list[Path]) -> list[tuple[int, int]]:
    """(width, height) from the headers; nothing is decoded. Raises CommandError."""
    sizes = []
    check_stdin(paths)
    for path in paths:
        data = read_image(path)
        with naming(path, data):
            info = read_header(data)
        sizes.append((info.width, info.height))
    return sizes


def _markers(model: PlannedModel) -> Callable[[TileGrid], int]:
    """What the prompt's form adds around an image's visual tokens: known where there is a tokenizer."""
    if model.directory is None or not (model.directory / "tokenizer.json").is_file():
        return lambda grid: 0
    spec = ModelSpec.load(model.directory)
    return lambda grid: spec.image_prompt_tokens(grid) - spec.geometry.rows(grid)


def image(
    photos: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE]...", readable=False, help="Only headers are read.")
    ] = None,
    model: VisionModel = "7b-mha",
    machine: Device = "h100",
    tiles: Annotated[int, typer.Option(help="Without photos: tiles of an image.")] = 13,
    images_per_request: Annotated[
        int, typer.Option("--images", help="Without photos: images of a request.")
    ] = 1,
    detail: Annotated[Literal["auto", "low", "high"], typer.Option(help="As in the API.")] = "auto",
    pooling: Annotated[
        int, typer.Option(help="Patches the connector joins: 1, 4, 9, 16; 0: the model's.")
    ] = 0,
    tile_pixels: Annotated[int, typer.Option(help="The tower's input size; 0: the model's.")] = 0,
    patch_pixels: Annotated[int, typer.Option(help="The tower's patch size; 0: the model's.")] = 0,
    text_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 30,
    weight_bits: Weights = 16,
    kv_bits: Annotated[
        float,
        typer.Option(help="Bits per cached element; 0: 16, for a checkpoint the engine's."),
    ] = 0,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    block_size: Annotated[
        int, typer.Option(min=0, help="Positions of a KV block; 0: 1, for a checkpoint the engine's.")
    ] = 0,
    max_pixels: MaxPixels = 0,
    exact: Exact = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """What an image costs, from tiling rule to concurrent conversations.

    Example: vlm plan image photo.jpg --model smolvlm-256m --machine l40s
    """
    chosen, device = load_model(model), load_machine(machine)
    tower = _tower(chosen)
    if pooling:
        tower = images.with_pooling(tower, pooling)
    if tile_pixels or patch_pixels:
        geometry = tower.geometry
        tower = images.with_encoder(
            tower, tile_pixels or geometry.image_size, patch_pixels or geometry.patch_size
        )
    decoder = decoder_of(chosen, exact)
    bits = precision_of(weight_bits, kv_bits or (32 if chosen.directory else 16))
    precision = stored(chosen, decoder, bits, weights, kv_storage)
    block = block_size or (BLOCK_SIZE if chosen.directory else 1)
    costs: tuple[images.ImageFigures, ...] = ()
    image_of: Grid = tower.geometry.squares(at_least_one(tiles, "the number of tiles"))
    if not image_of.tile_width:  # each image has its own size
        image_of = TYPICAL_IMAGE
    grids, markers = [image_of] * images_per_request, 0
    if photos:
        if chosen.tiling is None:
            raise CostError(f"{chosen.name} has no tiling rule")
        sizes = _probe_sizes(photos)
        rule = capped(chosen.tiling, max_pixels or (CPU_PIXELS if machine == "this" else ACCELERATOR_PIXELS))
        costs = images.costs_of_images(
            sizes, rule, tower, decoder, detail, precision.kv_bytes, _markers(chosen), block
        )
        grids = [rule.grid(*size, detail) for size in sizes]
        markers = sum(cost.prompt_tokens - cost.visual_tokens for cost in costs)
    plan = images.plan_image(
        decoder,
        tower,
        device,
        grids,
        at_least_one(text_tokens, "the number of text tokens"),
        precision,
        markers,
        block,
        costs,
        chosen.config is not None and chosen.config.whole_spans,
    )
    title = f"{chosen.title} on {device.name}: {plan.images} images, {text_tokens} text tokens"
    notes = [f"{markers} tokens of image markers"] if markers else []
    if plot:
        from vlm.plan.plots import plot_image

        plot_image(plot, title, plan)
    show(plan, images.render_image(plan, title, notes), as_json, model=chosen.name, machine=device.name)


@dataclass(frozen=True, slots=True)
class ScheduleReports:
    """One report per policy, over the same requests."""

    reports: tuple[ScheduleReport, ...]


def _requests(
    file: Path | None, rate: float, num: int, prompt: str, output: str, seed: int
) -> tuple[Arrival, ...]:
    if file is not None:
        return read_arrivals(file)
    if rate:
        return poisson_arrivals(rate, num, Lengths.parse(prompt), Lengths.parse(output), seed)
    return ARTICLE_REQUESTS


def schedule(
    model: Annotated[
        str, typer.Option("--model", help="A preset, 'default', a folder or a config.json.")
    ] = "llama-3-8b",
    machine: Device = "h100",
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}; may be repeated. All, if not given.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences decoded together.")] = 8,
    window_ms: Annotated[float, typer.Option(min=0, help="dynamic: how long a group waits.")] = 50.0,
    token_budget: Annotated[int, typer.Option(help="chunked: tokens of a step.")] = 512,
    prefill_devices: Annotated[int, typer.Option(help="disaggregated: devices that only prefill.")] = 1,
    requests: Annotated[
        Path | None, typer.Option(help="JSON lines: arrival_s, prompt_tokens, output_tokens.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, help="Poisson arrivals/s; 0: the articles' eight requests.")
    ] = 0.0,
    num_requests: Annotated[int, typer.Option(help="With --rate: how many.")] = 200,
    prompt: Annotated[
        str, typer.Option(help="fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")
    ] = "lognormal:1000:1",
    output: Annotated[str, typer.Option(help="As --prompt.")] = "lognormal:150:0.8",
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Limit for goodput; 0 is none.")] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0, help="Limit for goodput; 0 is none.")] = 50.0,
    weight_bits: Weights = 16,
    kv_bits: Cache = 16,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    exact: Exact = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Simulate schedulers over the same requests: latency percentiles, slot use, goodput.

    Example: vlm plan schedule --rate 10 --slots 32 --policy static --policy chunked --plot timeline.png
    """
    chosen, device = load_model(model), load_machine(machine)
    arrivals = _requests(requests, rate, num_requests, prompt, output, seed)
    policies: list[Policy] = [_policy(name) for name in policy or POLICIES]
    if "disaggregated" in policies and not policy and not device.link_bandwidth:
        policies.remove("disaggregated")  # this machine has no peer to send a cache to
    shape = decoder_of(chosen, exact)
    precision = stored(chosen, shape, precision_of(weight_bits, kv_bits), weights, kv_storage)
    base = Rules("static", slots, window_ms / 1e3, token_budget, prefill_devices)
    sims = [simulate(shape, device, arrivals, replace(base, policy=name), precision) for name in policies]
    reports = ScheduleReports(tuple(report(sim, slo_ttft_ms / 1e3, slo_tpot_ms / 1e3) for sim in sims))
    title = f"{chosen.title} on {device.name}: {len(arrivals)} requests, {slots} slots"
    if plot:
        from vlm.plan.plots import plot_timeline

        plot_timeline(plot, title, sims)
    show(reports, render_reports(reports.reports, title), as_json, model=chosen.name, machine=device.name)


def _policy(name: str) -> Policy:
    for known in POLICIES:
        if name == known:
            return known
    raise CostError(f"{name} is not a policy; policies: {', '.join(POLICIES)}")


FLEET = FleetLoad()


def fleet(
    model: VisionModel = "smolvlm-2.2b",
    machine: Device = "l40s",
    rate: Annotated[float, typer.Option(help="Questions/s of all users.")] = FLEET.requests_per_s,
    questions: Annotated[float, typer.Option(help="Questions per image.")] = FLEET.questions_per_image,
    think_s: Annotated[float, typer.Option(help="Seconds between two of them.")] = FLEET.think_s,
    tiles: Annotated[float, typer.Option(help="Tiles per image.")] = FLEET.tiles_per_image,
    image_kb: Annotated[int, typer.Option(help="Upload size of an image, kB.")] = FLEET.image_bytes // 1000,
    text_tokens: Annotated[int, typer.Option(help="Tokens of a question.")] = FLEET.text_tokens,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = FLEET.output_tokens,
    slo_ttft_ms: Annotated[float, typer.Option(help="Limit of the mean TTFT.")] = FLEET.slo_ttft_s * 1e3,
    slo_tpot_ms: Annotated[float, typer.Option(help="Limit of TPOT.")] = FLEET.slo_tpot_s * 1e3,
    max_utilisation: Annotated[float, typer.Option(help="Of every stage.")] = FLEET.max_utilisation,
    weight_bits: Weights = 16,
    kv_bits: Cache = 16,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    exact: Exact = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """How many preprocess workers, encoders and replicas a load needs, up to internet scale.

    Example: vlm plan fleet --model smolvlm-2.2b --machine l40s --rate 100000
    """
    chosen, device = load_model(model), load_machine(machine)
    tower, shape = _tower(chosen), decoder_of(chosen, exact)
    precision = stored(chosen, shape, precision_of(weight_bits, kv_bits), weights, kv_storage)
    load = FleetLoad(
        requests_per_s=rate,
        questions_per_image=questions,
        think_s=think_s,
        tiles_per_image=tiles,
        image_bytes=image_kb * 1000,
        text_tokens=text_tokens,
        output_tokens=output_tokens,
        slo_ttft_s=slo_ttft_ms / 1e3,
        slo_tpot_s=slo_tpot_ms / 1e3,
        max_utilisation=max_utilisation,
    )
    plan = fleets.plan_fleet(shape, tower, device, load, precision)
    title = f"{chosen.title} on {device.name}, mean TTFT {slo_ttft_ms:g} ms, TPOT {slo_tpot_ms:g} ms"
    if plot:
        from vlm.plan.plots import plot_fleet

        rates = [rate * factor for factor in (0.01, 0.1, 1.0, 10.0)]
        loads = [replace(load, requests_per_s=one) for one in rates]
        plans = [fleets.plan_fleet(shape, tower, device, one, precision) for one in loads]
        plot_fleet(plot, title, list(zip(rates, plans, strict=True)))
    show(plan, fleets.render_fleet(plan, load, title), as_json, model=chosen.name, machine=device.name)
