"""Batches on disk: one folder each, whose state file is replaced whole and whose rows are only appended.

<data dir>/batches/<namespace>/<batch id>/
    state.json     what clients see; renamed into place at each change of status
    input.jsonl    a link to the input file, so that deleting that one does no harm
    index.jsonl    where the rows of a valid input lie, one line each
    output.jsonl   answered rows          errors.jsonl   failed rows
    cancel         present once cancelling was asked for
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vlm.api.batches.batch_check import LineError
from vlm.requests.durable import make_folder, sync_folder
from vlm.requests.errors import ApiError
from workers.contract.versions import known_fields

log = logging.getLogger(__name__)

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FINAL: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
INPUT, INDEX, OUTPUT, ERRORS = "input.jsonl", "index.jsonl", "output.jsonl", "errors.jsonl"


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Times are Unix seconds; None where it has not come to that."""

    id: str
    namespace: str
    caller: str
    created_ns: int  # for the order of the list
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    errors: tuple[LineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    ends_as: Status | None = None  # what finalizing leads to

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BatchJob:
        """Raises ValueError."""
        try:
            errors = tuple(LineError(**known_fields(LineError, error)) for error in value["errors"])
            batch = cls(**{**known_fields(cls, value), "errors": errors})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a batch's state: {error!r}") from None
        if batch.status not in get_args(Status):
            raise ValueError("unknown status")
        return batch


@dataclass(slots=True)
class BatchStore:
    """Blocking; call it from a thread. Raises ApiError 404 for what isn't there or is someone else's."""

    data_dir: Path
    clock: Callable[[], float] = time.time
    _root: Path = field(init=False)

    def __post_init__(self) -> None:
        self._root = self.data_dir / "batches"

    def create(
        self,
        namespace: str,
        caller: str,
        *,
        endpoint: str,
        input_file_id: str,
        input_path: Path,
        window: str,
        window_s: int,
        metadata: dict[str, str] | None,
    ) -> BatchJob:
        """The state file is written last: before that the batch does not exist."""
        now = int(self.clock())
        batch = BatchJob(
            id=f"batch_{uuid.uuid4().hex}",
            namespace=namespace,
            caller=caller,
            created_ns=time.time_ns(),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
        )
        folder = self.folder(batch)
        make_folder(folder)
        try:
            os.link(input_path, folder / INPUT)
        except FileNotFoundError:
            raise ApiError(404, "file_not_found", "File not found.", "input_file_id") from None
        except OSError:  # another file system
            shutil.copyfile(input_path, folder / INPUT)
        self.save(batch)
        return batch

    def _namespace_folder(self, namespace: str) -> Path:
        return self._root / hashlib.sha256(namespace.encode()).hexdigest()[:32]

    def folder(self, batch: BatchJob) -> Path:
        return self._namespace_folder(batch.namespace) / batch.id

    def save(self, batch: BatchJob) -> None:
        folder = self.folder(batch)
        fresh = folder / "state.new"
        with fresh.open("w") as out:
            json.dump(asdict(batch), out)
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(folder / "state.json")
        sync_folder(folder)

    def get(self, namespace: str, batch_id: str) -> BatchJob:
        missing = ApiError(404, "batch_not_found", "Batch not found.")
        if not BATCH_ID.fullmatch(batch_id):
            raise missing
        folder = self._namespace_folder(namespace) / batch_id
        try:
            return BatchJob.from_json(json.loads((folder / "state.json").read_text()))
        except FileNotFoundError:
            raise missing from None

    def newest_first(self, namespace: str) -> list[BatchJob]:
        found = self._read_all(self._namespace_folder(namespace).glob("batch_*/state.json"))
        return sorted(found, key=lambda batch: (batch.created_ns, batch.id), reverse=True)

    def unfinished(self) -> list[BatchJob]:
        """Of all namespaces, oldest first."""
        found = self._read_all(self._root.glob("*/batch_*/state.json"))
        return sorted((batch for batch in found if not batch.is_final), key=lambda batch: batch.created_ns)

    def _read_all(self, paths: Iterator[Path]) -> list[BatchJob]:
        batches = []
        for path in paths:
            try:
                batches.append(BatchJob.from_json(json.loads(path.read_text())))
            except FileNotFoundError:
                continue
            except ValueError:
                log.exception("a batch was skipped: its state can't be read", extra={"path": str(path)})
        return batches

    def ask_to_cancel(self, batch: BatchJob) -> None:
        (self.folder(batch) / "cancel").touch()
        sync_folder(self.folder(batch))

    def cancel_asked(self, batch: BatchJob) -> bool:
        return (self.folder(batch) / "cancel").exists()

    def forget_rows(self, batch: BatchJob) -> None:
        """After its files were published and its state says so."""
        for name in (INPUT, INDEX, OUTPUT, ERRORS):
            (self.folder(batch) / name).unlink(missing_ok=True)

    def exists(self) -> bool:
        return self._root.is_dir()

    def lock(self) -> int:
        """A file descriptor that holds the directory's lock until it is closed. Raises BlockingIOError."""
        self._root.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd
