"""How many preprocess workers, encoders and replicas a load needs, and what losing prefix affinity costs.

Stages are queues with Poisson arrivals. A replica shares its time between prefills, which queue, and decode
steps, which keep their share; with affinity a question goes to the replica that holds its image's prefix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from encoder.geometry import TYPICAL_IMAGE, TowerShape
from llm.cost import (
    Bound,
    CostError,
    DecoderShape,
    Machine,
    Precision,
    decode_time,
    max_batch,
)
from vlm.plan.labs.image_lab import encode_time
from vlm.plan.labs.roofline import end_to_end_seconds, littles_law
from vlm.plan.render import count, duration, gigabytes, pairs, percent
from vlm.plan.simulation.prefix_routing import FleetLoad, Routing, Sizing
from vlm.plan.simulation.queueing import QueueStage, size_stage


@dataclass(frozen=True, slots=True)
class FleetPlan:
    preprocess: QueueStage  # CPU workers, one core each
    encode: QueueStage
    affinity: Routing  # questions about an image go to the replica that holds it
    scattered: Routing  # questions go anywhere
    replicas_lost: int  # what scattering costs
    in_flight: float  # requests, by Little's law
    upload_bytes_per_s: float
    visual_bytes_per_s: float  # visual tokens from encoders to replicas
    resident_images: float  # images between their first and last question
    resident_images_capacity: float  # that one replica's cache holds beside its decoding sequences
    max_batch: int  # of a replica within the TPOT limit and its memory
    binds: Bound


def decode_batch_within(
    shape: DecoderShape, machine: Machine, context: int, slo_tpot_s: float, precision: Precision
) -> int:
    """The largest batch whose step is within the limit and whose caches fit; 0 if even one is too slow."""
    low, high = 0, max_batch(shape, machine, context, precision)
    while low < high:
        middle = (low + high + 1) // 2
        if decode_time(shape, machine, middle, context, precision).seconds <= slo_tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def plan_fleet(
    shape: DecoderShape,
    tower: TowerShape,
    machine: Machine,
    load: FleetLoad,
    precision: Precision | None = None,
) -> FleetPlan:
    """Sizes every stage. Raises CostError if the limits can't be met by any number of machines."""
    precision = precision or Precision()
    image_rate = load.requests_per_s / load.questions_per_image
    image = tower.geometry.squares(math.ceil(load.tiles_per_image))
    if not image.tile_width:  # each image has its own size
        image = TYPICAL_IMAGE
    share = load.slo_ttft_s / 10  # what queueing may add in front of each stage
    cutting_s = image.num_tiles * machine.preprocess_s_per_tile
    preprocess = size_stage(image_rate, cutting_s, share, load.max_utilisation)
    encoding = encode_time(tower, machine, [image], precision)
    encode = size_stage(
        image_rate, encoding.seconds, share, load.max_utilisation, spread=0.5, binds=encoding.binds
    )
    visual = tower.geometry.rows(image)
    context = visual + load.text_tokens + load.output_tokens // 2
    most = decode_batch_within(shape, machine, context, load.slo_tpot_s, precision)
    if not most:
        raise CostError("not even one sequence decodes within the TPOT limit on this machine")
    before = preprocess.service_s + preprocess.wait_s + encode.service_s + encode.wait_s
    sizing = Sizing(shape, machine, load, precision, visual, context, most, before)
    ideal, scattered = sizing.route(scattered=False), sizing.route(scattered=True)
    resident = littles_law(image_rate, sizing.image_lifetime_s)
    tpot = decode_time(shape, machine, max(1, round(ideal.batch)), context, precision).seconds
    return FleetPlan(
        preprocess=preprocess,
        encode=encode,
        affinity=ideal,
        scattered=scattered,
        replicas_lost=scattered.replica.servers - ideal.replica.servers,
        in_flight=littles_law(
            load.requests_per_s, end_to_end_seconds(ideal.ttft_mean_s, tpot, load.output_tokens)
        ),
        upload_bytes_per_s=image_rate * load.image_bytes,
        visual_bytes_per_s=image_rate * tower.output_bytes(image),
        resident_images=resident,
        resident_images_capacity=sizing.images_held(ideal.batch),
        max_batch=most,
        binds="capacity" if ideal.prefix_kept < 1.0 else ideal.replica.binds,
    )


def render_fleet(plan: FleetPlan, load: FleetLoad, title: str) -> str:
    def replicas(routing: Routing) -> str:
        return (
            f"{count(routing.replica.servers)} at {percent(routing.replica.utilisation)}, batch "
            f"{count(round(routing.batch))}, TTFT {duration(routing.ttft_mean_s)} "
            f"({percent(routing.hit_fraction)} hits)"
        )

    def stage(one: QueueStage) -> str:
        waits = f"{duration(one.service_s)} a job, waits {duration(one.wait_s)}"
        return f"{count(one.servers)} at {percent(one.utilisation)} ({waits}; {one.binds})"

    rows = [
        ("load", f"{count(load.requests_per_s)} questions/s, {count(plan.in_flight)} in flight"),
        ("preprocess workers", stage(plan.preprocess)),
        ("encoders", stage(plan.encode)),
        ("replicas, with affinity", replicas(plan.affinity)),
        ("replicas, scattered", replicas(plan.scattered)),
        ("cost of scattering", f"{count(plan.replicas_lost)} replicas"),
        ("batch limit of a replica", count(plan.max_batch)),
        (
            "live images",
            f"{count(plan.resident_images)}, {count(plan.resident_images_capacity)} held by a replica",
        ),
        ("uploads", f"{gigabytes(plan.upload_bytes_per_s)}/s"),
        ("visual tokens", f"{gigabytes(plan.visual_bytes_per_s)}/s"),
        ("binds", plan.binds),
    ]
    notes = (
        "roofline floors and mean waits; visual tokens are encoded once per image and shared",
        "images are spread evenly: a popular image on one replica is not modelled",
    )
    return pairs(title, rows, notes)
