"""Fetching images on clients' behalf: SSRF tricks, redirects, endless bodies, slow hosts."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from fake_engine_client import ask, live_server, png
from hypothesis import given, settings
from hypothesis import strategies as st
from small_servers import serving

from vlm.api.storage.addresses import AllowedOrigins, public_address
from vlm.api.storage.fetch import Fetcher, resolve
from vlm.config import ServeConfig
from vlm.requests.errors import ApiError
from vlm.settings import SettingsError

CHAT = "/v1/chat/completions"


@settings(deadline=None, max_examples=300)
@given(address=st.ip_addresses(v=4))
def test_wrapped_addresses_are_judged_by_what_they_wrap(address: ipaddress.IPv4Address) -> None:
    """F1: IPv4-mapped, 6to4 and NAT64 forms open nothing that the plain form doesn't."""
    number = int(address)
    for wrapped in (
        ipaddress.IPv6Address(f"::ffff:{address}"),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
    ):
        assert public_address(wrapped) <= public_address(address)
    isatap = ipaddress.IPv6Address((0x2606_4700 << 96) | (0x5EFE << 32) | number)
    assert public_address(isatap) == public_address(address)
    teredo = ipaddress.IPv6Address((0x2001_0000 << 96) | (0x0808_0808 << 64) | (number ^ 0xFFFF_FFFF))
    assert not public_address(teredo)


# IANA's special-purpose registries, and what no registry names but nobody may be led to
SPECIAL = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
    *("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23"),
    *("2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)


@pytest.mark.parametrize("network", SPECIAL)
def test_no_special_range_is_the_internet_whatever_pythons_own_table_says(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: site-local addresses, for one, are global to some releases of Python."""
    monkeypatch.setattr("vlm.api.storage.addresses._ordinary", lambda address: True)
    block = ipaddress.ip_network(network)
    last = block.num_addresses - 1
    for address in (block[place] for place in (0, last // 3, last // 2, last)):
        assert not public_address(address), address


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254",
        "100.64.0.1", "100.100.100.200", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1",
        "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1",
        "::ffff:169.254.169.254",
        "::127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_the_internet(address: str) -> None:
    """F1."""
    assert not public_address(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111"])
def test_addresses_that_are_the_internet(address: str) -> None:
    assert public_address(ipaddress.ip_address(address))


class Origin(BaseHTTPRequestHandler):
    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(f"{self.headers['host']}{self.path}")
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"\x89PNG" * 16_384)
            except OSError:
                return
        elif self.path == "/slow":
            threading.Event().wait(3)
        elif self.path.startswith("/redirect?"):
            self.send_response(302)
            self.send_header("location", self.path.partition("?")[2])
            self.end_headers()
        elif self.path.startswith("/busy?") and self.seen.count(self.seen[-1]) <= 2:
            status, _, wait = self.path.partition("?")[2].partition("&")
            self.send_response(int(status))
            self.send_header("retry-after", wait)
            self.end_headers()
        elif self.path == "/image" or self.path.startswith("/busy?"):
            self.send_response(200)
            self.send_header("content-type", "text/plain")
            self.end_headers()
            self.wfile.write(png(21, 34))
        else:
            self.send_response(404)
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def origin() -> Iterator[int]:
    Origin.seen.clear()
    with serving(Origin) as port:
        yield port


def fetch(
    url: str,
    *,
    names: dict[str, list[str]],
    max_bytes: int = 1 << 20,
    deadline_s: float = 5.0,
    allowed: AllowedOrigins | None = None,
) -> bytes:
    """With a resolver of our own, and with 127.0.0.1 standing for the public internet."""

    async def resolver(host: str, port: int) -> list[str]:
        return names.get(host, [host])

    async def run() -> bytes:
        fetcher = Fetcher(
            deadline_s,
            resolver=resolver,
            allowed=allowed or AllowedOrigins.of("", "127.0.0.1", allow_urls=True),
        )
        return await fetcher.fetch(url, max_bytes, "p")

    return asyncio.run(run())


def refusal(url: str, **options: Any) -> str:
    with pytest.raises(ApiError) as caught:
        fetch(url, **{"names": {}, **options})
    assert caught.value.status_code == 400
    assert "127." not in caught.value.message and "169." not in caught.value.message
    return caught.value.code


def test_fetch_goes_to_the_checked_address_with_the_name_as_host() -> None:
    """F1: resolved once; content is judged by its bytes and not by its type."""
    with origin() as port:
        data = fetch(f"http://images.test:{port}/image", names={"images.test": ["127.0.0.1"]})
        assert data == png(21, 34)
        assert Origin.seen == [f"images.test:{port}/image"]


def test_one_private_address_among_good_ones_is_enough_to_refuse() -> None:
    """F1."""
    names = {"two.test": ["127.0.0.1", "169.254.169.254"]}
    with origin() as port:
        assert refusal(f"http://two.test:{port}/image", names=names) == "url_blocked"
        assert Origin.seen == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://[::1]/", "http://[::ffff:10.0.0.1]/", "http://localhost/",
        "http://0/", "http://2130706433/", "http://0x7f.1/", "http://017700000001/", "http://user:pw@1.1.1.1/",
        "http://127.1/", "http:///x", "http://[fe80::1%25eth0]/", "https://[fd00:ec2::254]/",
    ],
)  # fmt: skip
def test_spellings_of_inner_addresses_are_refused(url: str) -> None:
    """F1, with the real resolver."""

    async def run() -> None:
        await Fetcher(5.0).fetch(url, 1000, "p")

    with pytest.raises(ApiError) as caught:
        asyncio.run(run())
    assert caught.value.code in ("url_blocked", "url_fetch_failed", "invalid_image_url")


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/", "file:///etc/passwd", "http://10.0.0.1/", "//[::1]/"]
)
def test_redirects_are_checked_again(target: str) -> None:
    """F1."""
    with origin() as port:
        url = f"http://images.test:{port}/redirect?{target}"
        assert refusal(url, names={"images.test": ["127.0.0.1"]}) == "url_blocked"


def test_redirects_are_followed_within_limits() -> None:
    names = {"images.test": ["127.0.0.1"]}
    with origin() as port:
        assert fetch(f"http://images.test:{port}/redirect?/image", names=names) == png(21, 34)
        loop = f"http://images.test:{port}/redirect?/redirect?/redirect?/redirect?/redirect?/image"
        assert refusal(loop, names=names) == "too_many_redirects"


def test_endless_body_ends_at_the_cap() -> None:
    """F3."""
    with origin() as port:
        url = f"http://images.test:{port}/endless"
        assert refusal(url, names={"images.test": ["127.0.0.1"]}) == "image_too_large"


def test_slow_host_ends_at_the_deadline() -> None:
    """F2."""
    with origin() as port:
        url = f"http://images.test:{port}/slow"
        assert refusal(url, names={"images.test": ["127.0.0.1"]}, deadline_s=0.3) == "url_timeout"


NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@settings(deadline=None, max_examples=100)
@given(
    scheme=st.sampled_from(["http", "https", "HTTP", "ftp", "http:"]),
    host=st.one_of(
        st.sampled_from(["1.1.1.1", "[::1]", "[::ffff:1.1.1.1%1]", "a" * 300 + ".test", "xn--a", "a..b", ""]),
        st.text(max_size=8),
    ),
    port=st.one_of(
        st.just(""),
        st.integers().map(lambda n: f":{n}"),
        st.text("0123456789１-+eE_", max_size=30).map(":{}".format),
    ),
    path=st.text(max_size=8),
)
def test_no_url_that_a_stranger_writes_is_a_fault_of_ours(
    scheme: str, host: str, port: str, path: str
) -> None:
    """Ports beyond 65535, numbers of hundreds of digits, names that no encoding takes."""

    async def resolver(name: str, number: int) -> list[str]:
        return await resolve("127.0.0.1", number)  # the system's own, which parses the port

    fetcher = Fetcher(1.0, resolver=resolver, verify=NO_AUTHORITIES)

    async def run(url: str) -> None:
        await fetcher.fetch(url, 1000, "p")

    for place in (f":{10**400}", port):
        with pytest.raises(ApiError) as caught:
            asyncio.run(run(f"{scheme}://{host}{place}/{path}"))
        assert caught.value.status_code == 400


def test_a_port_that_no_host_has_is_named() -> None:
    """Wherever the URL comes from: a redirect's target too."""
    for port in (0, 65536, 99999):
        assert refusal(f"http://1.1.1.1:{port}/") == "invalid_image_url"
    with origin() as port:
        url = f"http://images.test:{port}/redirect?http://1.1.1.1:99999/"
        assert refusal(url, names={"images.test": ["127.0.0.1"]}) == "invalid_image_url"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_while_time_is_left(status: int) -> None:
    names = {"images.test": ["127.0.0.1"]}
    with origin() as port:
        assert fetch(f"http://images.test:{port}/busy?{status}&0", names=names) == png(21, 34)
        assert len(Origin.seen) == 3
    with origin() as port:
        with pytest.raises(ApiError) as caught:
            fetch(f"http://images.test:{port}/busy?{status}&3600", names=names)
        assert caught.value.code == "url_fetch_failed" and str(status) in caught.value.message
        assert len(Origin.seen) == 1


def test_the_status_of_a_refusal_is_named() -> None:
    with origin() as port, pytest.raises(ApiError) as caught:
        fetch(f"http://images.test:{port}/nothing", names={"images.test": ["127.0.0.1"]})
    assert caught.value.message == "The image's URL was answered with status 404."


@pytest.mark.parametrize(
    ("hosts", "host", "is_allowed"),
    [
        ("images.test", "images.test", True),
        ("images.test", "IMAGES.test.", True),
        ("images.test", "evil-images.test", False),
        ("images.test", "a.images.test", False),
        ("*.images.test", "a.images.test", True),
        ("*.images.test", "images.test", False),
        ("other.test, images.test", "images.test", True),
    ],
)
def test_hosts_that_are_not_listed_are_refused_before_they_are_looked_up(
    hosts: str, host: str, is_allowed: bool
) -> None:
    allowed = AllowedOrigins.of(hosts, "127.0.0.1", allow_urls=False)
    with origin() as port:
        url = f"http://{host}:{port}/image"
        options: dict[str, Any] = {"names": {host.lower(): ["127.0.0.1"]}, "allowed": allowed}
        if is_allowed:
            assert fetch(url, **options) == png(21, 34)
            assert refusal(f"http://{host}:{port}/redirect?http://not.test/", **options) == "url_blocked"
        else:
            assert refusal(url, **options) == "url_blocked" and Origin.seen == []


def test_networks_alone_open_nothing_else() -> None:
    allowed = AllowedOrigins.of("", "127.0.0.0/8, fd00::/8", allow_urls=False)
    for address, is_allowed in (
        ("127.9.9.9", True),
        ("fd00::1", True),
        ("1.1.1.1", False),
        ("10.0.0.1", False),
    ):
        assert allowed.has_address(ipaddress.ip_address(address)) is is_allowed
    with pytest.raises(SettingsError):
        AllowedOrigins.of("", "10.0.0.1/8", allow_urls=True)


def test_dead_host_is_a_400() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert refusal(f"http://127.0.0.1:{free.getsockname()[1]}/image") == "url_fetch_failed"


def test_fetching_is_off_by_default_and_guarded_when_on() -> None:
    """F1, F2: a server told to fetch still refuses loopback, and its neighbours go on."""
    with origin() as port:
        url = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/image"}}
        with live_server() as running, running.client() as http:
            assert http.post(CHAT, json=ask(url, "What?")).json()["error"]["code"] == "url_fetching_disabled"
        with live_server(config=ServeConfig(allow_urls=True)) as running, running.client() as http:
            answered = http.post(CHAT, json=ask(url, "What?"))
            assert answered.status_code == 400 and answered.json()["error"]["code"] == "url_blocked"
        assert Origin.seen == []
        config = ServeConfig(allow_image_networks="127.0.0.1")
        with live_server(config=config) as running, running.client() as http:
            assert http.post(CHAT, json=ask(url, "What?")).status_code == 200


def test_fetched_image_equals_an_inline_one() -> None:
    """D2: one decode path, whichever way an image comes in."""
    with origin() as port, live_server(config=ServeConfig(allow_urls=True)) as running:
        running.service.fetcher = Fetcher(5.0, allowed=AllowedOrigins.of("", "127.0.0.0/8", allow_urls=True))
        url = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/image"}}
        keys = []
        with running.client() as http:
            for part in (url, png(21, 34)):
                assert http.post(CHAT, json=ask(part, "What?")).status_code == 200
                keys.append(running.engine.submitted[-1].prompt.spans)
        assert keys[0] == keys[1]
