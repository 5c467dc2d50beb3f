"""API keys, from a file and from the environment; kept as hashes.

The keys file is TOML:

    [[keys]]
    name = "reports"
    sha256 = "..."            # of the key itself: printf %s KEY | sha256sum
    namespace = "reports"     # images, files and caches are shared within it; default: the name
    requests_per_minute = 60  # 0 is off; default: the server's setting
    tokens_per_minute = 0     # of prompts and answers; 0 is off; default: the server's setting

VLM_API_KEYS holds keys themselves, separated by commas; they share the namespace "environment".
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from vlm.settings import SettingsError

ENVIRONMENT = "VLM_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    sha256: str
    namespace: str = ""
    requests_per_minute: int = -1  # -1: the server's setting
    tokens_per_minute: int = -1  # -1: the server's setting


def load_keys(keys_file: str, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Those of the file, if one is named, and of the environment. Raises SettingsError."""
    from_file = read_keys(Path(keys_file)) if keys_file else ()
    keys = (*from_file, *environment_keys(environment))
    _check_distinct(keys, f"the keys file and {ENVIRONMENT}")
    return keys


def environment_keys(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Raises SettingsError for a key that is too short."""
    texts = [text.strip() for text in environment.get(ENVIRONMENT, "").split(",")]
    texts = [text for text in texts if text]
    if any(len(text) < _MIN_KEY_CHARS for text in texts):
        raise SettingsError(f"each key in {ENVIRONMENT} must have at least {_MIN_KEY_CHARS} characters")
    return tuple(
        ApiKey(f"environment-{number}", hashlib.sha256(text.encode()).hexdigest(), "environment")
        for number, text in enumerate(texts, 1)
    )


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Raises SettingsError for a file that is missing, malformed or empty."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"can't read the keys file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise SettingsError("the keys file is not valid TOML") from None
    rows = table.get("keys")
    if set(table) != {"keys"} or not isinstance(rows, list) or not rows:
        raise SettingsError("the keys file must hold [[keys]] tables and nothing else")
    keys = tuple(_read_key(row) for row in rows)
    _check_distinct(keys, "the keys file")
    return keys


def _check_distinct(keys: Sequence[ApiKey], place: str) -> None:
    if len({key.name for key in keys}) < len(keys) or len({key.sha256 for key in keys}) < len(keys):
        raise SettingsError(f"two keys of {place} have the same name or the same hash")


def _read_key(row: object) -> ApiKey:
    known = {f.name for f in fields(ApiKey)}
    if not isinstance(row, dict) or not {"name", "sha256"} <= row.keys() <= known:
        raise SettingsError(f"each key needs a name and a sha256, and may have {_listed(known)}")
    name, namespace = row["name"], row.get("namespace", row["name"])
    if not all(isinstance(text, str) and _NAME.fullmatch(text) for text in (name, namespace)):
        raise SettingsError("names and namespaces of keys may hold letters, digits, '.', '_' and '-'")
    if not isinstance(row["sha256"], str) or not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]):
        raise SettingsError("a key's sha256 must have 64 lowercase hex digits")
    rates = {limit: row.get(limit, -1) for limit in ("requests_per_minute", "tokens_per_minute")}
    for limit, rate in rates.items():
        if type(rate) is not int or rate < -1:
            raise SettingsError(f"a key's {limit} must be a whole number")
    return ApiKey(name, row["sha256"], str(namespace), **rates)


def _listed(known: set[str]) -> str:
    *most, last = sorted(known - {"name", "sha256"})
    return f"{', '.join(most)} and {last}"
