"""Where each row of a journal stands."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from vlm.caption.presets import length_prefixed_digest
from vlm.caption.rows import Row, is_settled, slot_of, work_of


class JournalIndex:
    """Rows by slot and by work. sqlite's unnamed database spills to an unlinked temporary file."""

    _LIVE = (
        "FROM rows LEFT JOIN documents USING (path, question) "
        "WHERE documents.sha IS NULL OR documents.sha = '' OR rows.sha = documents.sha"
    )

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA cache_size = -4096")  # KiB
        self._db.executescript(
            """
            CREATE TABLE rows (
                slot TEXT PRIMARY KEY, id TEXT, state TEXT, start INTEGER, length INTEGER,
                path TEXT, page INTEGER, question TEXT, sha TEXT
            ) WITHOUT ROWID;
            CREATE TABLE works (work TEXT PRIMARY KEY, start INTEGER, length INTEGER) WITHOUT ROWID;
            CREATE TABLE documents (
                path TEXT, question TEXT, sha TEXT, position INTEGER, PRIMARY KEY (path, question)
            ) WITHOUT ROWID;
            """
        )
        self._num_lines = 0

    def put(self, row: Row, offset: int, length: int) -> None:
        state = "text" if "text" in row else "error" if is_settled(row) else "retry"
        slot = slot_of(row["path"], row["page"], row["question"])
        place = (offset, length, length_prefixed_digest(row["path"]), row["page"])
        values = (slot, row["id"], state, *place, row["question"], row["file_sha256"])
        self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        if state == "text" and row["image_sha256"]:
            work = work_of(row["image_sha256"], row["question"], row["model_revision"])
            self._db.execute("INSERT OR IGNORE INTO works VALUES (?, ?, ?)", (work, offset, length))
        self._num_lines += 1

    def row(self, slot: str) -> tuple[str, str, int, int] | None:
        """(id, state, offset, length)."""
        found = self._db.execute(
            "SELECT id, state, start, length FROM rows WHERE slot = ?", (slot,)
        ).fetchone()
        return None if found is None else (found[0], found[1], found[2], found[3])

    def work(self, work: str) -> tuple[int, int] | None:
        found = self._db.execute("SELECT start, length FROM works WHERE work = ?", (work,)).fetchone()
        return None if found is None else (found[0], found[1])

    def saw_document(self, path: str, question: str, sha: str, position: int) -> None:
        values = (length_prefixed_digest(path), question, sha, position)
        self._db.execute("INSERT OR IGNORE INTO documents VALUES (?, ?, ?, ?)", values)

    def live_places(self, *, in_input_order: bool) -> Iterator[tuple[int, int]]:
        order = "ifnull(position, 1 << 62), path, page, start" if in_input_order else "start"
        yield from self._db.execute(f"SELECT start, length {self._LIVE} ORDER BY {order}")

    def num_stale(self) -> int:
        (num_live,) = self._db.execute(f"SELECT count(*) {self._LIVE}").fetchone()
        return self._num_lines - int(num_live)

    def forget_rows(self) -> None:
        self._db.executescript("DELETE FROM rows; DELETE FROM works;")
        self._num_lines = 0

    def close(self) -> None:
        self._db.close()
