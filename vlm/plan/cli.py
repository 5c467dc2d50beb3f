"""`vlm plan`: the labs, the scheduler's simulation and the fleet, as commands."""

from __future__ import annotations

from typing import Annotated

import typer

from llm.cost import CostError, Parallel, prefill_work
from vlm.cli.groups import CommandGroup
from vlm.cli.options import Json
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.cli_load import fleet, image, schedule
from vlm.plan.labs import batch_lab as batching
from vlm.plan.labs import kv_lab as caches
from vlm.plan.labs import serve_lab as serving
from vlm.plan.plan_options import (
    Cache,
    Compute,
    Device,
    Exact,
    Model,
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

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def plan() -> None:
    """What serving a model costs, from bytes and FLOPs, before anyone runs it.

    Example: vlm plan serve --model llama-3-8b --machine h100 --batch 16
    """


@app.command()
def kv(
    model: Model = "llama-3-8b",
    machine: Device = "h100",
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 8192,
    sequences: Annotated[int, typer.Option(help="Concurrent sequences.")] = 8,
    weight_bits: Weights = 16,
    kv_bits: Cache = 16,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    block_size: Annotated[int, typer.Option(help="Positions of a block; 1 counts without paging.")] = 1,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """What the cache of a context costs, and how many sequences a device holds.

    Example: vlm plan kv --model 7b-mha --machine h100 --context 32768 --plot capacity.png
    """
    chosen, device = load_model(model), load_machine(machine)
    shape = decoder_of(chosen, False)
    precision = stored(chosen, shape, precision_of(weight_bits, kv_bits), weights, kv_storage)
    plan = caches.plan_kv(
        shape,
        device,
        at_least_one(context, "the context"),
        at_least_one(sequences, "the number of sequences"),
        precision,
        block_size=block_size,
    )
    title = f"{chosen.title} on {device.name}"
    if plot:
        from vlm.plan.plots import CONTEXTS, plot_capacity

        plot_capacity(plot, title, plan, caches.capacity_curve(shape, device, CONTEXTS, precision))
    show(plan, caches.render_kv(plan, title), as_json, model=chosen.name, machine=device.name)


@app.command()
def serve(
    model: Model = "llama-3-8b",
    machine: Device = "h100",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in.")] = 2048,
    output_tokens: Annotated[int, typer.Option(help="Tokens out.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences decoded together on a replica.")] = 16,
    cached_tokens: Annotated[int, typer.Option(help="Of the prompt, in the prefix cache.")] = 0,
    tensor: Annotated[int, typer.Option(help="Tensor-parallel devices.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    expert: Annotated[int, typer.Option(help="Expert-parallel devices.")] = 1,
    replicas: Annotated[int, typer.Option(help="Independent copies.")] = 1,
    draft: Annotated[int, typer.Option(help="Speculation: proposals per verification; 0 is off.")] = 0,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Probability that one is accepted.")] = 0.8,
    draft_cost: Annotated[float, typer.Option(min=0, help="Of one proposal, in target steps.")] = 0.05,
    rate: Annotated[float, typer.Option(min=0, help="Requests/s, for Little's law and goodput.")] = 0.0,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Limit; 0 is none.")] = 0.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=0, help="Limit; 0 is none.")] = 0.0,
    weight_bits: Weights = 16,
    kv_bits: Cache = 16,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    compute_bits: Compute = 16,
    exact: Exact = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Does it fit, how long to the first token and to every other, and what binds.

    Example: vlm plan serve --model llama-3.1-70b --machine h100 --tensor 4 --batch 32 --rate 5
    """
    chosen, device = load_model(model), load_machine(machine)
    shape = decoder_of(chosen, exact)
    bits = precision_of(weight_bits, kv_bits, compute_bits)
    precision = stored(chosen, shape, bits, weights, kv_storage)
    if not 0 <= cached_tokens < prompt_tokens:
        raise CostError("at least one token of the prompt must be uncached")
    load = serving.Workload(
        prompt_tokens,
        at_least_one(output_tokens, "the number of output tokens"),
        at_least_one(batch, "the batch"),
        cached_tokens,
        rate,
        slo_ttft_ms / 1e3,
        slo_tpot_ms / 1e3,
    )
    plan = serving.plan_serve(
        shape,
        device,
        load,
        precision,
        Parallel(tensor, pipeline, expert, replicas),
        serving.SpeculationGain(draft, acceptance, draft_cost) if draft else None,
    )
    title = f"{chosen.title} on {plan.devices} x {device.name}: {prompt_tokens:,} in, {output_tokens:,} out"
    if plot:
        from vlm.plan.plots import plot_roofline

        intensity = prefill_work(shape, prompt_tokens, cached_tokens, precision).intensity
        plot_roofline(plot, title, plan, device, intensity)
    show(plan, serving.render_serve(plan, title), as_json, model=chosen.name, machine=device.name)


@app.command()
def batch(
    model: Model = "llama-3-8b",
    machine: Device = "h100",
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 8192,
    tensor: Annotated[int, typer.Option(help="Tensor-parallel devices.")] = 1,
    weight_bits: Weights = 16,
    kv_bits: Cache = 16,
    weights: StoredWeights = None,
    kv_storage: StoredKv = None,
    compute_bits: Compute = 16,
    exact: Exact = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """The three limits of a batch: arithmetic, cache bytes, memory.

    Example: vlm plan batch --model llama-3-8b --context 32768 --kv-bits 8 --plot batching.png
    """
    chosen, device = load_model(model), load_machine(machine)
    shape = decoder_of(chosen, exact)
    bits = precision_of(weight_bits, kv_bits, compute_bits)
    plan = batching.plan_batch(
        shape,
        device,
        at_least_one(context, "the context"),
        stored(chosen, shape, bits, weights, kv_storage),
        at_least_one(tensor, "the number of devices"),
    )
    title = f"{chosen.title} on {device.name}, {context:,} tokens"
    if plot:
        from vlm.plan.plots import plot_batching

        plot_batching(plot, title, plan)
    show(plan, batching.render_batch(plan, title), as_json, model=chosen.name, machine=device.name)


for command in (image, schedule, fleet):
    app.command()(command)
