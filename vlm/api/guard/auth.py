"""Who calls, by key; and that nothing listens to the world without keys."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vlm.api.guard.keys import ENVIRONMENT, ApiKey
from vlm.config import ServeConfig, SettingsError
from vlm.requests.errors import ApiError

KEY_HEADERS = ("x-api-key", "api-key")  # as Anthropic's and Azure's clients send it, beside Authorization


@dataclass(frozen=True, slots=True)
class Caller:
    name: str = ""
    namespace: str = ""


class KeyRing:
    """Default deny: once there are keys, only their holders pass."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """From the next request on; those under way go on."""
        self._by_hash = {key.sha256: key for key in keys}
        self._by_name = {key.name: key for key in self._by_hash.values()}

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def __len__(self) -> int:
        return len(self._by_hash)

    def named(self, name: str) -> ApiKey | None:
        return self._by_name.get(name)

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """`headers`: by lowercase name. Raises ApiError 401."""
        if not self._by_hash:
            return Caller()
        digest = hashlib.sha256(_presented(headers).encode()).hexdigest()
        key = self._by_hash.get(digest)
        if key is None:
            raise ApiError(
                401,
                "invalid_api_key",
                "A valid API key is required, as 'authorization: Bearer KEY' or 'x-api-key: KEY'.",
                headers={"www-authenticate": "Bearer"},
            )
        return Caller(key.name, key.namespace)


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return next((headers[name].strip() for name in KEY_HEADERS if name in headers), "")


def check_exposure(config: ServeConfig, keys: KeyRing) -> None:
    """Raises ConfigError before the service listens to the world without keys."""
    if keys or config.allow_public:
        return
    try:
        loopback = ipaddress.ip_address(config.host.strip("[]")).is_loopback
    except ValueError:
        loopback = config.host == "localhost"
    if not loopback:
        raise SettingsError(
            f"{config.host} can be reached by others, and no keys are set: "
            f"give --keys-file FILE, set {ENVIRONMENT}, or give --allow-public if everyone may ask"
        )
