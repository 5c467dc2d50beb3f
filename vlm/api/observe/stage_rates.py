"""What the stages were measured to cost here, for estimates of requests that have not run."""

from __future__ import annotations

from dataclasses import dataclass

from llm.request import Timings, Usage
from vlm.pipeline import PreparedRequest

_WEIGHT = 0.2  # of the newest sample


@dataclass(slots=True)
class Average:
    """Exponentially weighted; None until the first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + _WEIGHT * (sample - self.value)


class StageRates:
    def __init__(self) -> None:
        self.preprocess_ms_per_megapixel = Average()
        self.encode_ms_per_row = Average()
        self.prefill_ms_per_token = Average()
        self.queue_ms = Average()

    def learn(self, prepared: PreparedRequest, usage: Usage, timings: Timings) -> None:
        """From a finished request; cached stages teach nothing."""
        computed = usage.prompt_tokens - usage.cached_tokens
        if computed > 0 and timings.prefill_ms > 0:
            self.prefill_ms_per_token.add(timings.prefill_ms / computed)
        self.queue_ms.add(timings.queue_ms)
        if timings.encode_ms > 0 and prepared.images:
            unique = {image.key: image for image in prepared.images}.values()
            pixels = sum(image.info.width * image.info.height for image in unique)
            self.preprocess_ms_per_megapixel.add(timings.preprocess_ms / (pixels / 1e6))
            self.encode_ms_per_row.add(timings.encode_ms / sum(image.num_tokens for image in unique))

    def expected_ttft_ms(self, megapixels: float, num_rows: int, num_tokens: int) -> float | None:
        """`num_rows`: visual tokens to encode. None until each stage that the request passes was seen."""
        stages = [(self.prefill_ms_per_token, float(num_tokens)), (self.queue_ms, 1.0)]
        if num_rows:
            stages += [
                (self.preprocess_ms_per_megapixel, megapixels),
                (self.encode_ms_per_row, float(num_rows)),
            ]
        total = 0.0
        for average, amount in stages:
            if average.value is None:
                return None
            total += average.value * amount
        return total
