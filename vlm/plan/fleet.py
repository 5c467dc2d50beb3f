"""How many preprocess workers, encoders and replicas a load needs, and what losing prefix affinity costs.

Stages are queues with Poisson arrivals. A replica shares its time between prefills, which queue, and decode
steps, which keep their share; with affinity a question goes to the replica that holds its image's prefix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from encoder.geometry import TowerShape
from llm.cost import (
    Bound,
    CostError,
    DecoderShape,
    Machine,
    Precision,
    decode_time,
    kv_bytes,
    kv_capacity_bytes,
    max_batch,
    prefill_time,
)
from vlm.plan.image import encode_time
from vlm.plan.queueing import Stage, mean_wait_s, size_stage
from vlm.plan.render import count, duration, gigabytes, pairs, percent
from vlm.plan.roofline import end_to_end_seconds, littles_law

_MAX_REPLICAS = 1 << 30


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Questions per second of all users, what each brings, and the limits."""

    requests_per_s: float = 100.0
    questions_per_image: float = 4.0  # one user asks this often about one image
    think_s: float = 30.0  # between two of these questions
    tiles_per_image: float = 13.0
    image_bytes: int = 2_000_000  # as uploaded
    text_tokens: int = 60
    output_tokens: int = 150
    slo_ttft_s: float = 1.0  # mean
    slo_tpot_s: float = 0.05
    max_utilisation: float = 0.8

    def __post_init__(self) -> None:
        positive = (self.requests_per_s, self.tiles_per_image, self.slo_ttft_s, self.slo_tpot_s)
        if min(positive) <= 0 or self.questions_per_image < 1 or self.think_s < 0:
            raise CostError("a load's rates and limits are above 0, with at least one question an image")
        if min(self.text_tokens, self.output_tokens) < 1 or not 0 < self.max_utilisation < 1:
            raise CostError("lengths are at least one token, utilisation lies between 0 and 1")


@dataclass(frozen=True, slots=True)
class Routing:
    """Replicas under one way of routing questions to them."""

    hit_fraction: float  # of questions that find their image's prefix in the cache
    replica: Stage
    batch: float  # sequences decoding on a replica, on average
    ttft_hit_s: float
    ttft_miss_s: float
    ttft_mean_s: float
    prefix_kept: float  # share of live prefixes that the cache has room for


@dataclass(frozen=True, slots=True)
class FleetPlan:
    preprocess: Stage  # CPU workers, one core each
    encode: Stage
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


def scattered_hits(questions: float, replicas: int) -> float:
    """Hit fraction when each question about an image goes to a random replica.

    An image's questions visit R(1 - (1 - 1/R)^Q) replicas, and each first visit is a miss.
    """
    visited = replicas * (1.0 - (1.0 - 1.0 / replicas) ** questions)
    return max(0.0, 1.0 - visited / questions)


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


@dataclass(frozen=True, slots=True)
class _Sizing:
    """What every number of replicas is judged by."""

    shape: DecoderShape
    machine: Machine
    load: FleetLoad
    precision: Precision
    visual: int  # visual tokens of an image
    context: int  # in the middle of an answer
    most: int  # sequences of a replica within the TPOT limit
    before_s: float  # preprocessing and encoding, once per image

    @property
    def image_lifetime_s(self) -> float:
        """First to last question about an image."""
        return (self.load.questions_per_image - 1.0) * self.load.think_s

    def images_held(self, batch: float) -> float:
        """Prefixes that a replica's cache holds beside `batch` decoding sequences."""
        room = kv_capacity_bytes(self.shape, self.machine, self.precision)
        room -= batch * kv_bytes(self.shape, self.context, self.precision.kv_bytes)
        return max(0.0, room) / kv_bytes(self.shape, self.visual, self.precision.kv_bytes)

    def batch_at(self, rate: float) -> float:
        """Sequences decoding at once on a replica that starts `rate` answers a second, `most` at the most."""
        batch = 1.0
        for _ in range(50):
            step = decode_time(self.shape, self.machine, max(1, round(batch)), self.context, self.precision)
            wanted = littles_law(rate, self.load.output_tokens * step.seconds)
            if wanted >= self.most:
                return float(self.most)
            if abs(wanted - batch) < 0.5:
                return wanted
            batch = wanted
        return batch

    def judge(self, replicas: int, routed_hits: float, copies: float) -> Routing:
        """The routing at this many replicas; `copies`: replicas that hold each live image."""
        rate = self.load.requests_per_s / replicas
        batch = self.batch_at(rate)
        image_rate = self.load.requests_per_s / self.load.questions_per_image
        resident = littles_law(image_rate, self.image_lifetime_s) * copies / replicas
        kept = min(1.0, self.images_held(batch) / resident) if resident else 1.0
        hits = routed_hits * kept
        prompt = self.visual + self.load.text_tokens
        miss = prefill_time(self.shape, self.machine, prompt, 0, self.precision)
        hit = prefill_time(self.shape, self.machine, prompt, self.visual, self.precision)
        mean = hits * hit.seconds + (1.0 - hits) * miss.seconds
        step = decode_time(self.shape, self.machine, max(1, round(batch)), self.context, self.precision)
        full = decode_time(self.shape, self.machine, self.most, self.context, self.precision)
        decoding = rate * self.load.output_tokens * full.seconds / self.most  # share of a replica's time
        stretched = mean / (1.0 - decoding) if decoding < 1.0 else math.inf
        square = (hits * hit.seconds**2 + (1.0 - hits) * miss.seconds**2) / mean**2 - 1.0
        wait = mean_wait_s(1, rate, stretched, square) if math.isfinite(stretched) else math.inf
        binds = miss.binds if rate * mean > decoding else step.binds
        first = self.before_s / self.load.questions_per_image
        return Routing(
            hit_fraction=hits,
            replica=Stage(replicas, mean, decoding + rate * mean, wait, binds),
            batch=batch,
            ttft_hit_s=wait + stretched / mean * hit.seconds,
            ttft_miss_s=wait + stretched / mean * miss.seconds + self.before_s,
            ttft_mean_s=wait + stretched + first,
            prefix_kept=kept,
        )

    def enough(self, routing: Routing) -> bool:
        within = routing.ttft_mean_s <= self.load.slo_ttft_s
        return within and routing.replica.utilisation <= self.load.max_utilisation

    def route(self, scattered: bool) -> Routing:
        """The fewest replicas that keep utilisation and the mean TTFT within their limits.

        Raises: CostError, if even idle replicas are too slow.
        """
        questions = self.load.questions_per_image

        def at(replicas: int) -> Routing:
            if scattered:
                visited = replicas * (1.0 - (1.0 - 1.0 / replicas) ** questions)
                return self.judge(replicas, scattered_hits(questions, replicas), visited)
            return self.judge(replicas, 1.0 - 1.0 / questions, 1.0)

        high = 1
        while not self.enough(at(high)):
            if high > _MAX_REPLICAS:
                raise CostError("the TTFT limit can't be met: even idle machines take longer")
            high *= 2
        low = high // 2 + 1 if high > 1 else 1
        while low < high:
            middle = (low + high) // 2
            if self.enough(at(middle)):
                high = middle
            else:
                low = middle + 1
        return at(high)


def plan_fleet(
    shape: DecoderShape,
    tower: TowerShape,
    machine: Machine,
    load: FleetLoad,
    precision: Precision | None = None,
) -> FleetPlan:
    """Sizes every stage. Raises: CostError, if the limits can't be met by any number of machines."""
    precision = precision or Precision()
    image_rate = load.requests_per_s / load.questions_per_image
    tiles = math.ceil(load.tiles_per_image)
    share = load.slo_ttft_s / 10  # what queueing may add in front of each stage
    preprocess = size_stage(image_rate, tiles * machine.preprocess_s_per_tile, share, load.max_utilisation)
    encoding = encode_time(tower, machine, tiles, precision)
    encode = size_stage(
        image_rate, encoding.seconds, share, load.max_utilisation, spread=0.5, binds=encoding.binds
    )
    visual = tower.geometry.num_visual_tokens(tiles)
    context = visual + load.text_tokens + load.output_tokens // 2
    most = decode_batch_within(shape, machine, context, load.slo_tpot_s, precision)
    if not most:
        raise CostError("not even one sequence decodes within the TPOT limit on this machine")
    before = preprocess.service_s + preprocess.wait_s + encode.service_s + encode.wait_s
    sizing = _Sizing(shape, machine, load, precision, visual, context, most, before)
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
        visual_bytes_per_s=image_rate * tower.output_bytes(tiles),
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

    def stage(one: Stage) -> str:
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
