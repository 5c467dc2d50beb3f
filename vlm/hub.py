"""Checkpoints by their hub id, through huggingface_hub: `ORG/NAME` or `ORG/NAME@REVISION`.

Its cache, its environment (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) and its resumed downloads are
what users of other tools know. Only what a checkpoint is read from is fetched: safetensors, JSON, tokenizer
and chat template; never code or pickles.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llm.text_config import ConfigError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

CONFIG_FILES = ("config.json", "processor_config.json", "preprocessor_config.json")
TEXT_FILES = (
    *CONFIG_FILES,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
_CACHED = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
_CHUNK_BYTES = 1 << 20
_MARGIN_BYTES = 64 << 20  # left free on the disk behind a download

Say = Callable[[str], None]
Files = Literal["config", "text", "all"]
"""How much of a checkpoint: what a plan is made from, what prompts are made from, or everything."""


class HubError(ConfigError):
    """A checkpoint that can't be had by its id; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str  # ORG/NAME
    revision: str | None = None  # a branch, tag or commit

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_id(text: str) -> HubId | None:
    """None for what is no id; whether a folder of that name exists is for the caller to ask first."""
    found = _ID.fullmatch(text)
    return HubId(found["repo"], found["revision"]) if found else None


def cached_repo(directory: Path) -> str | None:
    """ORG/NAME of a snapshot in the hub's cache, None for any other folder."""
    parts = directory.resolve().parts
    if len(parts) < 3 or parts[-2] != "snapshots":
        return None
    found = _CACHED.fullmatch(parts[-3])
    return f"{found['org']}/{found['name']}" if found else None


class Hub:
    """`endpoint`, `cache` and `token`: as in the environment where they are None."""

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        cache: Path | None = None,
        token: str | None = None,
        say: Say = lambda line: None,
    ) -> None:
        self._options: dict[str, Any] = {"endpoint": endpoint, "token": token}
        self._cache = cache
        self._say = say

    def fetch(self, model: HubId, files: Files = "all") -> Path:
        """The folder of a checkpoint, downloaded where it isn't complete here. One commit's files only.

        Raises HubError.
        """
        from huggingface_hub import constants

        self._check_leftovers(model)
        if constants.is_offline_mode():
            return self._local(model, files, "HF_HUB_OFFLINE is set")
        with _explained(model):
            try:
                info = self._info(model)
            except _unreachable() as error:
                return self._local(model, files, f"the hub can't be reached ({type(error).__name__})")
            assert info.sha is not None
            return self._download(model, info, files)

    def _info(self, model: HubId) -> ModelInfo:
        from huggingface_hub import HfApi

        return HfApi(**self._options).model_info(model.repo, revision=model.revision, files_metadata=True)

    def _download(self, model: HubId, info: ModelInfo, files: Files) -> Path:
        there = {file.rfilename: file for file in info.siblings or ()}
        if "config.json" not in there:
            raise HubError(f"{model} has no config.json: it is not a checkpoint that vlm can read")
        # by the name that was asked for, so that the cache knows its commit offline
        folder = self._get(model, "config.json").parent
        names = [name for name in (CONFIG_FILES if files == "config" else TEXT_FILES) if name in there]
        for name in names:
            self._get(model, name, folder.name)
        if files != "all":
            return folder
        self._fetch_checked(model, info, self._shards(model, there.keys(), folder), folder.name)
        return folder

    def fetch_files(self, model: HubId, names: Sequence[str]) -> Path:
        """The folder of a repository's files by name, downloaded where they aren't here. Raises HubError."""
        from huggingface_hub import constants

        self._check_leftovers(model)
        if constants.is_offline_mode():
            return self._local_files(model, names, "HF_HUB_OFFLINE is set")
        with _explained(model):
            try:
                info = self._info(model)
            except _unreachable() as error:
                return self._local_files(model, names, f"the hub can't be reached ({type(error).__name__})")
            there = {file.rfilename for file in info.siblings or ()}
            if lost := [name for name in names if name not in there]:
                raise HubError(f"{model} has no {lost[0]}; other formats are not read")
            assert info.sha is not None
            self._fetch_checked(model, info, names, info.sha)
            # by the name that was asked for, so that the cache knows its commit offline
            return self._get(model, names[0]).parent

    def _fetch_checked(self, model: HubId, info: ModelInfo, names: Sequence[str], commit: str) -> None:
        """Those of one commit that aren't here yet; digests are those that the hub promised."""
        there = {file.rfilename: file for file in info.siblings or ()}
        missing = [name for name in names if self._cached(model, name, commit) is None]
        size = sum(there[name].size or 0 for name in missing)
        if missing:
            self._check_space(model, size)
            self._say(f"{model}: downloading {size / 1e9:.2f} GB in {len(missing)} files")
        for name in missing:
            lfs = there[name].lfs
            if lfs is None:
                self._get(model, name, commit)
                continue
            note = self._unchecked(model) / f"{commit}-{lfs.sha256}"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(name)
            _check_digest(model, self._get(model, name, commit), lfs.sha256)
            note.unlink(missing_ok=True)

    def _unchecked(self, model: HubId) -> Path:
        """Beside the cache's own folders, a note for each file that may be here with its digest unread."""
        from huggingface_hub import constants

        cache = Path(self._cache or constants.HF_HUB_CACHE)
        return cache / f"models--{model.repo.replace('/', '--')}" / ".vlm-unchecked"

    def _check_leftovers(self, model: HubId) -> None:
        """Files whose download was killed before their digest was read; a damaged one is removed."""
        folder = self._unchecked(model)
        for note in sorted(folder.iterdir()) if folder.is_dir() else ():
            commit, _, digest = note.name.partition("-")
            path = self._cached(model, note.read_text(), commit)
            if path is not None:
                with suppress(HubError):
                    _check_digest(model, path, digest)
                note.unlink(missing_ok=True)

    def _cached(self, model: HubId, name: str, revision: str | None) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.repo, name, cache_dir=self._cache, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def _local_files(self, model: HubId, names: Sequence[str], why: str) -> Path:
        """Their folder in the cache, without a word to the hub."""
        found = [self._cached(model, name, model.revision) for name in names]
        for name, path in zip(names, found, strict=True):
            if path is None:
                raise HubError(f"{name} of {model} is not in the cache, and {why}")
        assert found[0] is not None
        return found[0].parent

    def _shards(self, model: HubId, there: Any, folder: Path) -> list[str]:
        if INDEX_FILE not in there:
            if SINGLE_FILE not in there:
                raise HubError(f"{model} has no safetensors weights; other formats are not read")
            return [SINGLE_FILE]
        shards = _shards_of(self._get(model, INDEX_FILE, folder.name))
        lost = [name for name in shards if name not in there]
        if lost:
            raise HubError(f"{model} lacks {lost[0]}, which its weight index names")
        return shards

    def _get(self, model: HubId, name: str, commit: str | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        revision = commit or model.revision
        return Path(
            hf_hub_download(model.repo, name, revision=revision, cache_dir=self._cache, **self._options)
        )

    def _local(self, model: HubId, files: Files, why: str) -> Path:
        """What the cache holds, complete, without a word to the hub."""
        found = self._cached(model, "config.json", model.revision)
        if found is None:
            raise HubError(f"{model} is not in the cache, and {why}; `vlm pull {model}` downloads it")
        folder = found.parent
        if files == "all" and (missing := missing_files(folder)):
            raise HubError(
                f"{model} is only partly in the cache (it lacks {missing[0]}), and {why}; "
                f"`vlm pull {model}` downloads the rest"
            )
        return folder

    def _check_space(self, model: HubId, size: int) -> None:
        from huggingface_hub import constants

        cache = Path(self._cache or constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if free < size + _MARGIN_BYTES:
            raise HubError(
                f"{model} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in the cache's folder; "
                "free some space, or point HF_HOME to another disk"
            )


def missing_files(folder: Path) -> list[str]:
    """Files without which a checkpoint folder can't be served, as its weight index names them."""
    needed = ["config.json", "tokenizer.json"]
    index = folder / INDEX_FILE
    needed += _shards_of(index) if index.is_file() else [SINGLE_FILE]
    return [name for name in needed if not (folder / name).is_file()]


def _shards_of(index: Path) -> list[str]:
    """File names in a weight index. Raises HubError for one that leads out of its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise HubError("the checkpoint's weight index can't be read") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise HubError("the checkpoint's weight index names a file outside its directory")
    return names


def _check_digest(model: HubId, path: Path, expected: str) -> None:
    """Removes a file whose bytes aren't those the hub promised. Raises HubError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise HubError(
            f"{path.name} of {model} arrived damaged: its sha256 is not the hub's. It was removed; try again"
        )


def _unreachable() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where no server answers; its HTTP library depends on its version."""
    kinds: list[type[Exception]] = [ConnectionError, TimeoutError]
    for library in ("httpx2", "httpx", "requests"):
        try:
            module = __import__(library)
        except ImportError:
            continue
        kinds.append(getattr(module, "TransportError", None) or module.ConnectionError)
    return tuple(kinds)


@contextmanager
def _explained(model: HubId) -> Iterator[None]:
    """The hub's refusals as one line each."""
    from huggingface_hub import errors

    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"{model} is gated: accept its terms on its page, then set HF_TOKEN (or run `hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"the hub has no model {model.repo}, or it is private; check its name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{model.repo} has no revision {model.revision or 'main'}") from None
    except errors.EntryNotFoundError as error:
        raise HubError(f"{model} lacks a file that it lists ({type(error).__name__})") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise HubError(f"the hub answered {status} for {model}; try again") from None
    except _unreachable() as error:
        raise HubError(
            f"the connection to the hub broke while {model} was fetched ({type(error).__name__}); run the "
            "same command again: files that are whole are kept"
        ) from None
    except OSError as error:
        if error.errno is None:  # huggingface_hub's check of a file's size
            raise HubError(
                f"a file of {model} arrived damaged: its size is not the hub's; try again"
            ) from None
        raise HubError(f"{model} can't be stored in the hub's cache: {error.strerror}") from None


__all__ = ["Hub", "HubError", "HubId", "cached_repo", "missing_files", "parse_hub_id"]
