"""Fetches an image on a client's behalf without becoming its way into the network behind this server.

A name is resolved once, every address it has is checked, and the connection goes to a checked address, so
that a second answer of a hostile name server is never used. Each redirect is a new URL to check. No proxies,
cookies, credentials or content encodings. A server that is busy (429, 503) is asked again while time is left.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

import httpx

from vlm.api.storage.addresses import ANY_PUBLIC, AllowedOrigins
from vlm.requests.errors import ApiError, invalid

Resolver = Callable[[str, int], Awaitable[list[str]]]

MAX_REDIRECTS = 3
MAX_URL_CHARS = 2048
MAX_PORT = 65535
_PARALLEL = 8
_BUSY = (429, 503)
_FIRST_WAIT_S = 0.25  # before a busy server is asked again, where it doesn't say; then twice as long


async def resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True)
class _Target:
    url: httpx.URL
    address: str  # the checked one to connect to
    host: str


class _Busy(Exception):
    """The URL's server has no time now."""

    def __init__(self, status: int, wait_s: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.wait_s = wait_s


class Fetcher:
    """`resolver` is replaced in tests only."""

    def __init__(
        self,
        deadline_s: float,
        *,
        resolver: Resolver = resolve,
        allowed: AllowedOrigins = ANY_PUBLIC,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._resolver = resolver
        self._allowed = allowed
        self._verify = verify
        self._slots = asyncio.Semaphore(_PARALLEL)

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """The system's authorities, read when the first URL is fetched: it takes tens of milliseconds."""
        return self._verify or httpx.create_ssl_context(trust_env=False)

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """The bytes, whatever they claim to be. Raises ApiError 400, naming no address."""
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                return await self._patiently(url, max_bytes, param, limit.when() or 0.0)
        except TimeoutError:
            raise invalid("url_timeout", "The image's URL did not answer in time.", param) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError, ArithmeticError):
            raise invalid("url_fetch_failed", "The image's URL could not be fetched.", param) from None

    async def _patiently(self, url: str, max_bytes: int, param: str, end: float) -> bytes:
        """`end`: by the event loop's clock."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with self._slots:
                    return await self._follow(url, max_bytes, param)
            except _Busy as busy:
                pause_s = max(wait_s, busy.wait_s or 0.0)
                if asyncio.get_running_loop().time() + pause_s >= end:
                    raise _failed(busy.status, param) from None
            await asyncio.sleep(pause_s)
            wait_s *= 2

    async def _follow(self, url: str, max_bytes: int, param: str) -> bytes:
        timeout = httpx.Timeout(self._deadline_s)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, verify=self._trusted) as client:
            for _ in range(MAX_REDIRECTS + 1):
                target = await self._check(url, param)
                request = client.build_request(
                    "GET",
                    target.url.copy_with(host=target.address),
                    headers={
                        "host": target.url.netloc.decode(),
                        "user-agent": "vlm",
                        "accept": "image/*",
                        "accept-encoding": "identity",
                    },
                    extensions={"sni_hostname": target.host},
                )
                response = await client.send(request, stream=True)
                try:
                    if response.has_redirect_location:
                        url = str(target.url.join(response.headers["location"]))
                        continue
                    return await _read(response, max_bytes, param)
                finally:
                    await response.aclose()
        raise invalid("too_many_redirects", "The image's URL redirects too often.", param)

    async def _check(self, url: str, param: str) -> _Target:
        if len(url) > MAX_URL_CHARS:
            raise invalid("invalid_image_url", f"A URL may have at most {MAX_URL_CHARS} characters.", param)
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise blocked(param)
        port = {"http": 80, "https": 443}[parsed.scheme] if parsed.port is None else parsed.port
        if not 0 < port <= MAX_PORT:
            raise invalid("invalid_image_url", f"A URL's port must be 1 to {MAX_PORT}.", param)
        if not self._allowed.has_host(parsed.host):
            raise invalid("url_blocked", "This server fetches no images from this host.", param)
        addresses = await self._resolver(parsed.host, port)
        # one bad address is enough: names that point at both are made to slip through
        if not addresses or not all(
            self._allowed.has_address(ipaddress.ip_address(address)) for address in addresses
        ):
            raise blocked(param)
        return _Target(parsed, addresses[0], parsed.raw_host.decode())


def blocked(param: str) -> ApiError:
    return invalid("url_blocked", "The image's URL is not on the public internet.", param)


def _failed(status: int, param: str) -> ApiError:
    return invalid("url_fetch_failed", f"The image's URL was answered with status {status}.", param)


async def _read(response: httpx.Response, max_bytes: int, param: str) -> bytes:
    if response.status_code in _BUSY:
        wait = response.headers.get("retry-after", "").strip()
        raise _Busy(response.status_code, float(wait) if wait.isdecimal() and len(wait) < 9 else None)
    if response.status_code != 200:
        raise _failed(response.status_code, param)
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            raise invalid("image_too_large", f"The image has more than {max_bytes} bytes.", param)
    return bytes(data)
