"""Lab 2: does it fit, how long to the first token, how long to every other one, and what binds each."""

from __future__ import annotations

from dataclasses import dataclass

from llm.cost import (
    Bound,
    Chunk,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    decode_work,
    device_kv_share,
    device_weight_bytes,
    expected_tokens,
    kv_bytes,
    kv_copies,
    max_batch,
    parallel_decode_time,
    prefill_time,
    step_time,
)
from vlm.plan.labs.roofline import end_to_end_seconds, littles_law
from vlm.plan.render import count, duration, gigabytes, pairs, percent


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked: lengths, the sequences decoded together, and optionally a rate and limits."""

    prompt_tokens: int = 2048
    output_tokens: int = 256
    batch: int = 16
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    rate_per_s: float = 0.0  # 0: not given
    slo_ttft_s: float = 0.0  # 0: none
    slo_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    num_draft: int  # proposals per verification
    acceptance: float = 0.8
    draft_cost: float = 0.05  # of one proposal, in target steps


@dataclass(frozen=True, slots=True)
class ServePlan:
    fits: bool
    device_bytes_used: float
    max_batch: int
    ttft_s: float
    ttft_binds: Bound
    tpot_s: float
    tpot_binds: Bound
    e2e_s: float
    output_tokens_per_s: float  # all sequences, all replicas
    user_tokens_per_s: float
    kv_share_of_step: float
    decode_intensity: float  # FLOP/byte
    ridge: float  # FLOP/byte
    devices: int
    kv_copies: float
    concurrency: float  # Little's law, 0 without a rate
    goodput_rps: float  # requests/s within the limits
    speculation_speedup: float  # 1 without speculation
    binds: Bound
    notes: tuple[str, ...] = ()


def plan_serve(
    shape: DecoderShape,
    machine: Machine,
    load: Workload,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
    speculation: SpeculationGain | None = None,
) -> ServePlan:
    """TTFT is an idle replica's; TPOT is taken at the middle of the answer; fit is judged at its end."""
    precision, parallel = precision or Precision(), parallel or Parallel()
    middle = load.prompt_tokens + load.output_tokens // 2
    last = load.prompt_tokens + load.output_tokens
    prefill = prefill_time(shape, machine, load.prompt_tokens, load.cached_tokens, precision, parallel.tensor)
    decode = parallel_decode_time(shape, machine, load.batch, middle, precision, parallel)
    tpot, speedup = decode.seconds, 1.0
    if speculation:
        tpot = speculative_tpot(shape, machine, load.batch, middle, speculation, precision, parallel.tensor)
        speedup = decode.seconds / tpot
    e2e = end_to_end_seconds(prefill.seconds, tpot, load.output_tokens)
    room = max_batch(shape, machine, last, precision, parallel)
    work = decode_work(shape, load.batch, middle, precision)
    concurrency = littles_law(load.rate_per_s, e2e)
    served = load.batch * parallel.replicas / e2e  # requests/s that leave
    within = _within(prefill.seconds, load.slo_ttft_s) and _within(tpot, load.slo_tpot_s)
    fits = load.batch <= room
    queued = bool(load.rate_per_s) and load.rate_per_s > served
    return ServePlan(
        fits=fits,
        device_bytes_used=_device_bytes(shape, machine, load.batch, last, precision, parallel),
        max_batch=room,
        ttft_s=prefill.seconds,
        ttft_binds=prefill.binds,
        tpot_s=tpot,
        tpot_binds=decode.binds,
        e2e_s=e2e,
        output_tokens_per_s=load.batch * parallel.replicas / tpot,
        user_tokens_per_s=1.0 / tpot,
        kv_share_of_step=work.kv_bytes / work.num_bytes,
        decode_intensity=work.intensity,
        ridge=machine.ridge(precision.compute_bits),
        devices=parallel.devices,
        kv_copies=kv_copies(shape, parallel.tensor),
        concurrency=concurrency,
        goodput_rps=(min(served, load.rate_per_s or served) if within and fits and not queued else 0.0),
        speculation_speedup=speedup,
        binds="capacity"
        if not fits
        else "queue"
        if queued
        else _larger(prefill.seconds, e2e, prefill.binds, decode.binds),
        notes=_notes(shape, parallel, speculation, speedup),
    )


def _within(seconds: float, limit: float) -> bool:
    return not limit or seconds <= limit


def _larger(prefill_s: float, e2e_s: float, prefill: Bound, decode: Bound) -> Bound:
    """What binds the half of the request that takes longer."""
    return prefill if prefill_s > e2e_s / 2 else decode


def _device_bytes(
    shape: DecoderShape, machine: Machine, batch: int, context: int, precision: Precision, parallel: Parallel
) -> float:
    cache = batch * kv_bytes(shape, context, precision.kv_bytes) * device_kv_share(shape, parallel)
    return device_weight_bytes(shape, parallel, precision) + cache + machine.workspace_bytes


def speculative_tpot(
    shape: DecoderShape,
    machine: Machine,
    batch: int,
    context: int,
    speculation: SpeculationGain,
    precision: Precision | None = None,
    tensor: int = 1,
) -> float:
    """Seconds per token: a verification of all proposals plus their drafting, over the tokens it yields."""
    rows = speculation.num_draft + 1
    verify = step_time(shape, machine, [Chunk(rows, context - 1, rows)] * batch, precision, tensor).seconds
    plain = step_time(shape, machine, [Chunk(1, context - 1)] * batch, precision, tensor).seconds
    drafted = speculation.num_draft * speculation.draft_cost * plain
    return (verify + drafted) / expected_tokens(speculation.acceptance, speculation.num_draft)


def _notes(
    shape: DecoderShape, parallel: Parallel, speculation: SpeculationGain | None, speedup: float
) -> tuple[str, ...]:
    notes = []
    copies = kv_copies(shape, parallel.tensor)
    if copies > 1:
        held = "the latent cache" if shape.latent_dim else "every cache"
        heads = "MLA has one latent for all heads" if shape.latent_dim else f"n_kv is {shape.num_kv_heads}"
        notes.append(f"{held} is held {copies:g} times over: {heads}, and a rank shards whole heads")
    if parallel.pipeline > 1:
        notes.append(
            "a pipeline fits and fills, it doesn't speed up a token: every stage is crossed in order"
        )
    if parallel.replicas > 1:
        notes.append("replicas share nothing, prefix caches included")
    if speculation and speedup < 1:
        notes.append("speculation loses here: the arithmetic it spends is no longer idle")
    if not shape.known_family:
        notes.append("this family is not known: its parameters are counted as Llama's would be")
    return tuple(notes)


def render_serve(plan: ServePlan, title: str) -> str:
    rows = [
        (
            "fits?",
            ("yes" if plan.fits else "no")
            + f" ({gigabytes(plan.device_bytes_used)} a device, B_max {count(plan.max_batch)})",
        ),
        ("TTFT", f"{duration(plan.ttft_s)} ({plan.ttft_binds})"),
        ("TPOT", f"{duration(plan.tpot_s)} ({plan.tpot_binds})"),
        ("E2E latency", duration(plan.e2e_s)),
        ("output tok/s, all seqs", count(plan.output_tokens_per_s)),
        ("per-user tok/s", count(plan.user_tokens_per_s)),
        ("KV share of step bytes", percent(plan.kv_share_of_step)),
        ("decode intensity", f"{plan.decode_intensity:.3g} FLOP/byte (ridge {plan.ridge:.0f})"),
        ("devices", count(plan.devices)),
    ]
    if plan.concurrency:
        rows.append(("in flight (Little)", count(plan.concurrency)))
        rows.append(("goodput", f"{plan.goodput_rps:.3g} requests/s"))
    if plan.speculation_speedup != 1.0:
        rows.append(("speculation", f"{plan.speculation_speedup:.3g}x"))
    rows.append(("binds", plan.binds))
    assumed = (
        "roofline floors: prefill at the stated share of peak, decode max(compute, bytes), collectives added"
    )
    return pairs(title, rows, [*plan.notes, assumed])
