"""Repositories of the Hugging Face hub: `hf://` locations to files, sizes, digests and bytes.

Owns the hub client, which is imported when a location first asks for it; what its failures mean is in
`hub_failures`. Refuses to know what the files hold. The client's cache is used as it is: only the client writes to it.

Source: cli.md, `WHERE`.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ninfer_convert import __version__
from ninfer_convert.errors import SourceError, UsageError, printable
from ninfer_convert.source.hub_failures import failure, is_passing, told, untyped

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

SCHEME = "hf://"
MAIN = "main"
PIECE_BYTES = 1 << 20
RETRIES = 3
"""Attempts after the first that bring no byte before a transfer is given up."""

DOWNLOADS = 4
"""Files fetched into the cache at a time."""

POLL_SECONDS = 0.05

_LOCATION = re.compile(r"hf://([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^@\s]+))?")
_PAIR = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)")
_PAGE = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/tree/(?P<revision>[^@\s?]+?))?/?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubLocation:
    """What a user wrote: `hf://owner/name`, perhaps with `@revision`."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{printable(self.revision)}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit; `sha256` is known of large files, `blob_id` is what git calls the others."""

    name: str
    size: int
    sha256: str | None
    blob_id: str

    def digest(self) -> tuple[Any, str]:
        """Returns a fresh hash object and what it must come to, in hexadecimal."""
        if self.sha256:
            return hashlib.sha256(), self.sha256
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False), self.blob_id


def is_hub(where: str) -> bool:
    """Tells whether a location is one of the hub."""
    return where.startswith(SCHEME)


def parse_location(where: str) -> HubLocation:
    """Returns the parts of an `hf://` location.

    Raises:
        UsageError: it is spelled otherwise.
    """
    found = _LOCATION.fullmatch(where)
    if not found:
        raise UsageError(f"{printable(where)}: write hf://owner/name or hf://owner/name@revision")
    return HubLocation(found[1], found[2])


def likely_meant(where: str) -> str | None:
    """Returns the `hf://` location that a path which leads nowhere was most likely meant as; None if it is a path.

    A page of the hub is one, and so is one owner/name pair, unless something is called like the owner.
    """
    if page := _PAGE.fullmatch(where):
        return str(HubLocation(page["repo"], page["revision"]))
    if _PAIR.fullmatch(where) and not os.path.lexists(where.split("/")[0]):
        return str(HubLocation(where, None))
    return None


def is_offline() -> bool:
    """Tells whether the user forbids the client to use the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How the hub client is set up; of the token only whether there is one, of its server no user and password."""

    cache: str
    server: str
    is_offline: bool
    has_token: bool


def client_settings() -> ClientSettings:
    """Returns the settings of the hub client, without any network."""
    from huggingface_hub import constants, get_token

    server = re.sub("//[^/]*@", "//", constants.ENDPOINT)
    return ClientSettings(constants.HF_HUB_CACHE, server, is_offline(), get_token() is not None)


def cached_snapshot(location: HubLocation) -> tuple[str, str]:
    """Returns directory and commit of what the cache holds of a location, without any network.

    Raises:
        SourceError: the cache does not know the revision, or holds nothing of it.
    """
    place = _cache_entry(location.repo)
    revision = location.revision or MAIN
    commit = revision
    offline = f"{location}: HF_HUB_OFFLINE is set and the hub cache"
    if not _COMMIT.fullmatch(revision):
        try:
            with open(os.path.join(place, "refs", *revision.split("/")), encoding="ascii") as file:
                commit = file.read(64).strip()
        except (OSError, ValueError):
            commit = ""
        if not _COMMIT.fullmatch(commit):
            raise SourceError(f"{offline} ({printable(place)}) does not know revision {printable(revision)}")
    directory = os.path.join(place, "snapshots", commit)
    if not os.path.isdir(directory):
        raise SourceError(f"{offline} holds no snapshot of commit {commit}: {printable(directory)} does not exist")
    return directory, commit


class Repository:
    """One commit of a repository; made by `connect`, usable from several threads.

    Attributes:
        repo: `owner/name`.
        commit: 40 hexadecimal digits.
        requested: the revision that was asked for.
        files: every file of the commit, by path.
    """

    def __init__(self, repo: str, commit: str, requested: str, files: Mapping[str, RemoteFile]) -> None:
        self.repo, self.commit, self.requested = repo, commit, requested
        self.files = MappingProxyType(files)

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}@{self.commit}"

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Returns the bytes `[begin, end)` of a file.

        Raises:
            NetworkError: the hub did not answer, or not in full.
            SourceError: it refuses.
        """
        return b"".join(self.pieces(name, begin, end))

    def pieces(
        self, name: str, begin: int, end: int, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[bytes]:
        """Yields the bytes `[begin, end)` of a file in order; a cut connection is taken up where it broke.

        It ends early when `is_stopped` says so.

        Raises:
            NetworkError, SourceError: like `read`.
        """
        http_error = untyped("errors").HTTPError
        tries = RETRIES
        while begin < end:
            before = begin
            try:
                for piece in self._request(name, begin, end):
                    if is_stopped():
                        return
                    begin += len(piece)
                    yield piece
                if begin < end:
                    raise EOFError(f"the connection ended {end - begin} bytes early")
            except (http_error, OSError, EOFError) as error:
                if is_stopped():
                    return
                tries = RETRIES if begin > before else tries - 1
                if tries < 0 or not is_passing(error):
                    raise failure(error, f"{self}/{printable(name)}", self.repo, self.requested) from error
                time.sleep(0.25 * 2 ** (RETRIES - tries))

    def is_cached(self, name: str) -> bool:
        """Tells whether the cache holds a file of this commit."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.repo, name, revision=self.commit), str)

    def fetch(self, names: Sequence[str]) -> str:
        """Brings files into the cache, those that it lacks, and returns the directory of the commit.

        Raises:
            NetworkError: the hub did not answer.
            OutputError: the cache cannot be written.
            SourceError: the hub refuses.
        """
        from huggingface_hub import hf_hub_download

        names_left, paths = list(reversed(names)), dict[str, str]()
        errors: list[BaseException] = []
        lock = threading.Lock()

        def work() -> None:
            try:
                while not errors:
                    with lock:
                        name = names_left.pop() if names_left else None
                    if name is None:
                        return
                    with told(f"{self}/{printable(name)}", self.repo, self.requested):
                        paths[name] = hf_hub_download(
                            self.repo,
                            name,
                            revision=self.commit,
                            library_name="ninfer-convert",
                            library_version=__version__,
                        )
            except BaseException as error:
                errors.append(error)

        # Daemons, so that an interrupt does not wait for the end of a transfer.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(DOWNLOADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not errors:
            time.sleep(POLL_SECONDS)
        if errors:
            raise errors[0]
        root = str(paths[names[0]])
        for _ in names[0].split("/"):
            root = os.path.dirname(root)
        return root

    def _request(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import constants, hf_hub_url

        utils = untyped("utils")
        headers = utils.build_hf_headers(library_name="ninfer-convert", library_version=__version__)
        headers["Accept-Encoding"] = "identity"
        if (begin, end) != (0, self.files[name].size):
            headers["Range"] = f"bytes={begin}-{end - 1}"
        url = hf_hub_url(self.repo, name, revision=self.commit)
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with utils.get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
            utils.hf_raise_for_status(response)
            # A server may ignore the range and send the whole file.
            skip, left = begin if response.status_code == 200 else 0, end - begin
            for piece in response.iter_bytes(PIECE_BYTES):
                kept = piece[skip : skip + left]
                skip -= min(skip, len(piece))
                left -= len(kept)
                if kept:
                    yield kept
                if not left:
                    return


def connect(location: HubLocation) -> Repository:
    """Asks the hub, once, which commit a location means and which files it has.

    Raises:
        SourceError: no such repository or revision, or it is gated.
        NetworkError: the hub did not answer.
    """
    from huggingface_hub import HfApi, constants

    _prepare()
    revision = location.revision or MAIN
    with told(str(location), location.repo, revision):
        api = HfApi(library_name="ninfer-convert", library_version=__version__)
        info = api.model_info(
            location.repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not _COMMIT.fullmatch(info.sha or ""):
            raise SourceError(f"{location}: {constants.ENDPOINT} names no commit; is it a hub?")
        if revision != info.sha:
            _remember(api, location.repo, revision, info)
    files = {}
    for file in info.siblings or ():
        sha256 = file.lfs.sha256 if file.lfs else None
        files[file.rfilename] = RemoteFile(file.rfilename, file.size or 0, sha256, file.blob_id or "")
    return Repository(location.repo, str(info.sha), revision, files)


def _remember(api: HfApi, repo: str, revision: str, info: ModelInfo) -> None:
    """Lets the client note in its cache which commit a revision is, without asking the hub a second time."""

    def known(*_: object, **__: object) -> ModelInfo:
        return info

    if hasattr(api, "resolve_revision"):
        api.repo_info = known  # type: ignore[method-assign]
        api.resolve_revision(repo, revision=revision)
    elif note := getattr(untyped("file_download"), "_cache_commit_hash_for_specific_revision", None):
        # Clients of the first 1.x versions have no public call for it.
        with suppress(OSError):
            note(_cache_entry(repo), revision, info.sha)


def _cache_entry(repo: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return os.path.join(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"))


def _prepare() -> None:
    """The client's own warnings stay silent: what went wrong is told once, by us."""
    utils = untyped("utils")
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        utils.disable_progress_bars()
