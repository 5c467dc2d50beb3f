"""Every setting of the service, once: the command line and config files take names and defaults from here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from encoder.encoder_config import Arithmetic
from llm.storage import KvOption, KvStorage, WeightOption
from vlm.settings import Between, Checked, Form, SettingsError

MEBIBYTE = 1 << 20  # what settings named *_mb count
# Where a tower takes an image whole, at its own size, it has at most so many pixels: 1,280 cells of 28 x 28
# on a CPU, which are 7 TFLOP in a tower of 670M parameters, and 5,350 elsewhere.
CPU_PIXELS = 1280 * 28**2
ACCELERATOR_PIXELS = 1 << 22
DEFAULT_MODEL = str(Path(__file__).parent / "model")

# what settings may be; ends included
Count = Annotated[int, Between(1, 1 << 20)]
FewCount = Annotated[int, Between(1, 1024)]  # of processes and threads
Mebibytes = Annotated[int, Between(1, 1 << 24)]
KV_CACHE_MB = 512
Seconds = Annotated[float, Between(0.001, 7 * 86_400)]
Rate = Annotated[int, Between(0, 1_000_000)]
RedisUrl = Annotated[
    str, Form(r"|(redis|rediss|unix|memory)://.*", "a redis:// URL, or empty", is_secret=True)
]
EngineName = Literal["auto", "native", "transformers", "openai"]
EngineUrl = Annotated[
    str, Form(r"|https?://[^/\s?#@]+(/[^\s?#]*)?", "an http:// or https:// URL without a password, or empty")
]
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^/\s,]+"
Origins = Annotated[
    str,
    Form(rf"|\*|\s*{_ORIGIN}(\s*,\s*{_ORIGIN})*\s*", "origins such as https://app.example, without a path"),
]
_HOST = r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?"
HostNames = Annotated[
    str,
    Form(rf"|\s*{_HOST}(\s*,\s*{_HOST})*\s*", "names such as images.example, *.cdn.example, or empty"),
]
_NETWORK = r"[0-9A-Fa-f.:]+(/\d{1,3})?"
Networks = Annotated[
    str, Form(rf"|\s*{_NETWORK}(\s*,\s*{_NETWORK})*\s*", "networks such as 10.1.0.0/16, or empty")
]
EmbedderName = Annotated[str, Form(r"|open_clip:\S.*", "open_clip:NAME@PRETRAINED or the like, or empty")]
# a path that is also the API's own could not be told from it
RootPath = Annotated[
    str,
    Form(
        r"|(?!/(v1|health|static|metrics|openapi\.json)(/|$))(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+",
        "a path such as /vlm that is none of the API's own, or empty",
    ),
]


@dataclass(frozen=True, slots=True)
class EngineOptions(Checked):
    """What an engine process needs to build itself; travels to it as JSON."""

    model: Annotated[str, Form(r"(?s).+", "not empty")] = DEFAULT_MODEL  # a Hugging Face checkpoint directory
    # auto: transformers where no family claims the model
    engine: EngineName = "auto"
    engine_url: EngineUrl = ""  # of the server that engine openai asks
    engine_model: str = ""  # the model's name there; empty: the first that it lists
    engine_key_file: str = ""  # holds its API key; empty: the variable VLM_ENGINE_KEY, or none
    backend: Literal["auto", "torch", "native"] = "auto"  # of the decoder; auto: native where it runs
    device: Annotated[str, Form(r"[a-z]+(:\d+)?", "cpu, cuda, cuda:1 or the like")] = "cpu"  # for all of it
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights and activations
    encoder_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the tower's products
    weights: WeightOption = "auto"  # stored as; auto: dtype, or bfloat16 where that loses nothing
    kv: KvOption = "auto"  # the KV cache stored as; auto: dtype
    threads: FewCount = 1  # of the engine
    kv_cache_mb: Annotated[int, Between(0, 1 << 24)] = 0  # for KV blocks; 0: 512, on a GPU what is free
    visual_cache_mb: Mebibytes = 256  # memory for visual tokens of images seen before
    max_running: Count = 16  # sequences decoded together
    max_tiles_per_step: Count = 8  # tiles encoded between two decode steps, at most
    max_pixels: Annotated[int, Between(0, 1 << 28)] = 0  # of an image that isn't tiled; 0: by device
    max_step_ms: Annotated[float, Between(1, 60_000)] = 500.0  # tiles or tokens of a step are fewer beyond
    stall_s: Annotated[float, Between(1, 86_400)] = 60.0  # an engine without a layer's progress is replaced
    kv_disk: str = ""  # folder where KV blocks and visual tokens of images outlive the process; empty: none
    kv_disk_mb: Mebibytes = 4096  # on disk, over all processes that share the folder
    prefix_cache: bool = True  # keep KV blocks of prompts for later prompts that begin alike
    speculation: Literal["off", "ngram"] = "off"  # guess tokens from the text so far, and verify them
    speculation_rows: Count = 5  # most sequences x (guesses + 1) in a step; the batch at the machine's ridge

    @property
    def pixel_cap(self) -> int:
        """Of an image that a tower takes whole."""
        return self.max_pixels or (CPU_PIXELS if self.device == "cpu" else ACCELERATOR_PIXELS)

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the products in a float32 encoder. `auto` is settled by `vlm.arithmetic.settled`."""
        return "bfloat16" if self.encoder_dtype == "bfloat16" and self.dtype == "float32" else "float32"

    @property
    def kv_bytes(self) -> int | None:
        """None: what a GPU has left beside the weights."""
        if not self.kv_cache_mb and self.device.startswith("cuda"):
            return None
        return (self.kv_cache_mb or KV_CACHE_MB) * MEBIBYTE

    @property
    def kv_storage(self) -> KvStorage:
        return self.dtype if self.kv == "auto" else self.kv


@dataclass(frozen=True, slots=True)
class ServeConfig(Checked):
    host: Annotated[str, Form(r"\S+", "an address or a name")] = "127.0.0.1"  # beyond it keys are needed
    port: Annotated[int, Between(0, 65535)] = 8000  # 0 takes a free one
    broker: RedisUrl = ""  # redis://...: preprocessing in Celery workers; empty: local processes
    store: RedisUrl = ""  # blob store; empty: the broker
    remote_engine: bool = False  # answers come from generate workers behind the broker
    decode_processes: FewCount = 2  # that decode and cut images, one thread each
    max_images_per_request: Count = 16  # those of the history count too
    max_image_mb: Mebibytes = 32  # of one image as it is sent
    max_image_megapixels: Count = 100  # of one image, from its header
    max_request_mb: Mebibytes = 64  # of one request's body
    max_queued: Count = 256  # requests that wait for their answer to begin
    request_deadline_s: Seconds = 300.0  # from a request's arrival to the end of its answer
    image_deadline_s: Seconds = 30.0  # to decode and cut one image
    drain_s: Annotated[float, Between(0, 7 * 86_400)] = 30.0  # for running answers when the server stops
    variant: Literal["fast", "exact"] = "fast"  # exact: pixels as the checkpoint's own processor makes them
    model_name: str = ""  # id shown to clients; empty: the model directory's name
    embedder: EmbedderName = ""  # the SigLIP model of /v1/embeddings; empty: none
    keys_file: str = ""  # TOML with [[keys]] tables, read again at SIGHUP; empty: VLM_API_KEYS's
    allow_public: bool = False  # listen on a public address without keys
    requests_per_minute: Rate = 0  # per key; 0 is off; a key's own setting wins
    tokens_per_minute: Annotated[int, Between(0, 10**9)] = 0  # of prompts and answers, per key; likewise
    tls_certfile: str = ""  # PEM chain, read again at SIGHUP; empty: plain HTTP
    tls_keyfile: str = ""  # PEM key; empty: it stands in tls_certfile
    allow_urls: bool = False  # fetch http(s) images of the public internet on clients' behalf
    allow_image_hosts: HostNames = (
        ""  # comma-separated: fetch from these alone; *.name takes what is below it
    )
    allow_image_networks: Networks = (
        ""  # comma-separated, such as 10.1.0.0/16: fetch from these addresses too
    )
    fetch_deadline_s: Seconds = 10.0  # to fetch one image
    root_path: RootPath = ""  # path under which a proxy shows this server; it may cut it off or not
    cors_origins: Origins = ""  # comma-separated; empty: no cross-origin requests
    default_max_tokens: Count = 512  # of an answer whose request names no limit
    max_choices: Annotated[int, Between(1, 128)] = 8  # `n` of one request
    max_request_megapixels: Count = 256  # of all images of one request
    max_decoded_mb: Mebibytes = 4096  # decoded images of requests whose answer has not begun
    max_bodies_mb: Mebibytes = 512  # request bodies being read or waiting for an answer
    body_timeout_s: Seconds = 60.0  # to read one request's body
    data_dir: str = ""  # files and batches; empty: $XDG_DATA_HOME/vlm
    max_file_mb: Mebibytes = 200  # of one stored file
    max_files_mb: Mebibytes = 4096  # of all stored files
    image_store_mb: Mebibytes = 512  # of all uploaded images
    image_ttl_s: Annotated[float, Between(1, 366 * 86_400)] = 86400.0  # an uploaded image's lifetime
    responses_mb: Annotated[int, Between(0, 1 << 24)] = 256  # of stored responses with their chats
    max_responses: Annotated[int, Between(0, 1 << 20)] = 1024  # that are stored; 0 stores none
    response_ttl_s: Annotated[float, Between(1, 366 * 86_400)] = 3600.0  # a stored response's lifetime
    log_format: Literal["auto", "json", "plain"] = "auto"  # auto: plain on a terminal, else json
    traces: bool = False  # OpenTelemetry spans over the stages; needs the extra [trace]

    @property
    def fetches_urls(self) -> bool:
        return self.allow_urls or bool(self.allow_image_hosts.strip() or self.allow_image_networks.strip())


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """A TOML file with the tables [serve] and [engine]."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    unknown = sorted(tables.keys() - {"serve", "engine"})
    if unknown:
        raise SettingsError(f"unknown table {', '.join(unknown)} in {path}; known: engine, serve")
    if not all(isinstance(table, dict) for table in tables.values()):
        raise SettingsError(f"{path} holds the tables [serve] and [engine]")
    return tables
