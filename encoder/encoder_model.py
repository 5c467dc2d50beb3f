"""The encoder: uint8 tiles of several images in, each image's visual tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from encoder.encoder_config import Arithmetic, EncoderConfig
from encoder.forward.mixed import multiply_in_bfloat16
from encoder.forward.tile_graphs import TileGraphs, TileRecorder
from encoder.geometry import Grid, TileShape
from encoder.packing import pack
from encoder.revision import with_arithmetic
from encoder.tower import Tower

# A forward's work: enough to hide the per-call overhead, no more, since a larger one is not faster per tile
# and holds its activations all at once.
FORWARD_FLOPS_CPU = 2e9
FORWARD_FLOPS_ACCELERATOR = 8e12


def tiles_per_forward(config: EncoderConfig, device: torch.device) -> int:
    """At least one: large towers on a CPU take tiles one by one, small ones many at a time.

    Images of their own sizes go one by one: no padding, and each is bitwise what it is in any company.
    """
    square = config.geometry.squares(1)
    if not square.tile_width:
        return 1
    budget = FORWARD_FLOPS_CPU if device.type == "cpu" else FORWARD_FLOPS_ACCELERATOR
    return max(1, int(budget // config.shape.flops(square)))


class Encoder:
    """Normalisation, tower and connector. Not thread-safe: one owner.

    Forwards run on a thread of their own, whose heap holds nothing but their temporaries, megabytes that are
    freed together. Beside what outlives them (visual tokens, requests) glibc would leave a hole at every
    such neighbour: gigabytes, once a visual cache of 256 MiB has filled.
    """

    def __init__(self, config: EncoderConfig, tower: Tower, connector: nn.Module, revision: str) -> None:
        self.config = config
        self.tower = tower.eval().requires_grad_(False)
        self.connector = connector.eval().requires_grad_(False)
        self.revision = revision
        self.d_model = config.connector.d_model
        self.row_width = config.row_width
        self.tiles_computed = 0  # every tile that went through the tower, padding included; there is none
        weight = next(tower.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.tiles_per_forward = tiles_per_forward(config, self.device)
        threads = torch.get_num_threads()
        self._ticks = np.zeros(1, np.int64)
        self._graphs: TileGraphs | None = None
        self._shift, self._factor = self._normalisation()
        # On a GPU encodes run beside the decoder's steps, on a stream of their own.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(1, "encoder", torch.set_num_threads, (threads,))

    def multiply_in(self, arithmetic: Arithmetic) -> None:
        """Matrix products in this type from now on, in a float32 encoder: see encoder.forward.mixed."""
        if arithmetic == "bfloat16" and self.dtype == torch.float32:
            multiply_in_bfloat16(self.tower)
            multiply_in_bfloat16(self.connector)
            self.revision = with_arithmetic(self.revision, arithmetic)
            # These sum in an order that depends on how many rows there are: a tile goes alone, so that
            # it is bitwise the same in any company.
            self.tiles_per_forward = 1

    def capture_forwards(self, recorder: Callable[[], TileRecorder]) -> None:
        """From now on forwards over square tiles are captured and replayed."""
        if self.config.geometry.image_size:
            self._graphs = TileGraphs(self._tokens, self.device, recorder)

    def wait(self) -> None:
        """What is queued on this thread's stream from now on comes after every encode before."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)

    def count_progress(self, ticks: np.ndarray) -> None:
        """From now on a forward adds to `ticks` (int64 [1]) with every linear, norm or other part of it."""

        self._ticks = ticks

        def tick(*_: object) -> None:
            ticks[0] += 1

        for network in (self.tower, self.connector):
            for module in network.modules():
                if not any(module.children()):
                    module.register_forward_hook(tick)

    def num_rows(self, tiles: np.ndarray) -> int:
        """Visual tokens that tiles [n, H, W, 3] give."""
        return self.config.geometry.rows(TileShape.of(tiles.shape))

    def rows_of_image(self, grid: Grid) -> int:
        """Visual tokens of a whole image."""
        return self.config.geometry.rows(grid)

    @torch.inference_mode()
    def pack(self, rows: Tensor, grid: Grid) -> Tensor:
        """What `encode` gave for all tiles of an image, as the decoder reads it: itself, where nothing is
        packed."""
        packing = self.config.packing
        if packing is None:
            return rows
        self.wait()
        side = self.config.geometry.cells(grid)[0]
        newline: Tensor = self.connector.newline  # type: ignore[assignment]
        return pack(rows, newline, packing, side, grid)

    def flops(self, tiles: np.ndarray) -> float:
        return self.config.shape.flops(TileShape.of(tiles.shape))

    @torch.inference_mode()
    def encode(self, images: Sequence[np.ndarray]) -> list[Tensor]:
        """Visual tokens of each image, [num_rows, row_width], tiles in the order given.

        `images` are uint8 [n_i, H_i, W_i, 3]. Square tiles of all images share forwards, without padding.
        Each result owns its memory, so that a cache that keeps one image doesn't keep its neighbours. Raises
        ValueError for tiles of another size or type.
        """
        for tiles in images:
            self._check(tiles)
        results = [
            torch.empty(self.num_rows(tiles), self.row_width, dtype=self.dtype, device=self.device)
            for tiles in images
        ]
        self._thread.submit(self._encode_into, results, images).result()
        return results

    @torch.inference_mode()
    def _encode_into(self, results: Sequence[Tensor], images: Sequence[np.ndarray]) -> None:
        if self._stream is None:
            self._fill(results, images)
            return
        self._stream.wait_stream(
            torch.cuda.default_stream(self.device)
        )  # it may still read what results reuse
        with torch.cuda.stream(self._stream):
            self._fill(results, images)
            self._done = torch.cuda.Event()
            self._done.record()

    def _fill(self, results: Sequence[Tensor], images: Sequence[np.ndarray]) -> None:
        """Leaves nothing behind on the thread that runs it."""
        places = [
            (tiles[i], rows)
            for tiles, result in zip(images, results, strict=True)
            for i, rows in enumerate(result.view(len(tiles), -1, self.row_width))
        ]
        for start in range(0, len(places), self.tiles_per_forward):
            chunk = places[start : start + self.tiles_per_forward]
            tokens = self.forward(np.stack([tile for tile, _ in chunk]))
            for rows, (_, place) in zip(tokens, chunk, strict=True):
                place.copy_(rows)

    def forward(self, tiles: np.ndarray) -> Tensor:
        """One batch of uint8 tiles [n, H, W, 3] to [n, rows of a tile, row_width]."""
        self.tiles_computed += len(tiles)
        self._ticks[0] += 1
        if self._graphs is not None and (tokens := self._graphs.run(tiles)) is not None:
            return tokens
        return self._tokens(torch.from_numpy(np.ascontiguousarray(tiles)).to(self.device))

    def _tokens(self, pixels: Tensor) -> Tensor:
        return self.connector(*self.tower.features(self._normalised(pixels), self.config.deepstack))

    def normalise(self, tiles: np.ndarray) -> Tensor:
        """uint8 [n, H, W, 3] to the tower's input [n, 3, H, W], in its dtype."""
        return self._normalised(torch.from_numpy(np.ascontiguousarray(tiles)).to(self.device))

    def _normalised(self, pixels: Tensor) -> Tensor:
        return pixels.float().mul_(self._factor).sub_(self._shift).permute(0, 3, 1, 2).to(self.dtype)

    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """What a pixel's channels are lessened by after they were multiplied, and by what."""
        rule = self.config.normalisation
        std = torch.tensor(rule.std, device=self.device)
        return torch.tensor(rule.mean, device=self.device) / std, rule.scale / std

    def _check(self, tiles: np.ndarray) -> None:
        side, cell = self.config.geometry.image_size, self.config.geometry.cell_size
        fits = tiles.dtype == np.uint8 and tiles.ndim == 4 and tiles.shape[3] == 3 and len(tiles) > 0
        if side:
            if not fits or tiles.shape[1:3] != (side, side):
                raise ValueError(f"tiles must be uint8 [n, {side}, {side}, 3] with n of at least 1")
        elif not fits or min(tiles.shape[1:3]) < cell:
            raise ValueError(f"tiles must be uint8 [n, H, W, 3] with n of at least 1, H and W of {cell}")
