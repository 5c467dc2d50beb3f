"""Tiles in the blob store, where a preprocess worker put them and an encoder gets them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from preprocess.types import TileGrid, Tiles
from preprocess.wire import from_bytes
from workers.cluster.blobs import BlobStore, BlobStoreUnavailable
from workers.cluster.names import TILES_TTL_S
from workers.contract.tiles_handle import TilesLost

log = logging.getLogger(__name__)


class StoredTiles:
    """`TilesHandle`. Those in a store that is away count as lost."""

    def __init__(
        self, store: BlobStore, url: str, blob: str, grid: TileGrid, on_close: Callable[[], None]
    ) -> None:
        """url: of the store, by which another stage knows it for its own."""
        self.url = url
        self.blob = blob
        self.grid = grid
        self._store = store
        self._on_close = on_close

    def renew(self) -> None:
        """They stay for TILES_TTL_S from now. Raises TilesLost and BlobStoreUnavailable."""
        if not self._store.renew(self.blob, TILES_TTL_S):
            raise TilesLost

    def open(self) -> Tiles:
        try:
            return from_bytes(self.wire(), self.grid)
        except ValueError as misfit:
            log.warning("the tiles stored for an image are not its own: %s", misfit)
        with contextlib.suppress(BlobStoreUnavailable):
            self._store.delete(self.blob)
        raise TilesLost

    def wire(self) -> bytes:
        try:
            data = self._store.get(self.blob)
        except BlobStoreUnavailable:
            raise TilesLost from None
        if data is None:
            raise TilesLost
        return data

    def close(self) -> None:
        self._on_close()
