"""How questions find a replica, and what each way of routing them costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm.cost import (
    CostError,
    DecoderShape,
    Machine,
    Precision,
    decode_time,
    kv_bytes,
    kv_capacity_bytes,
    prefill_time,
)
from vlm.plan.labs.roofline import littles_law
from vlm.plan.simulation.queueing import QueueStage, mean_wait_s

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
    replica: QueueStage
    batch: float  # sequences decoding on a replica, on average
    ttft_hit_s: float
    ttft_miss_s: float
    ttft_mean_s: float
    prefix_kept: float  # share of live prefixes that the cache has room for


def scattered_hits(questions: float, replicas: int) -> float:
    """Hit fraction when each question about an image goes to a random replica.

    An image's questions visit R(1 - (1 - 1/R)^Q) replicas, and each first visit is a miss.
    """
    visited = replicas * (1.0 - (1.0 - 1.0 / replicas) ** questions)
    return max(0.0, 1.0 - visited / questions)


@dataclass(frozen=True, slots=True)
class Sizing:
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
            replica=QueueStage(replicas, mean, decoding + rate * mean, wait, binds),
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

        Raises CostError if even idle replicas are too slow.
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
