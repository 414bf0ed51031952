"""A hub on loopback: real HTTP, the endpoints that the real client asks, counted, and wrong in the ways hubs are wrong.

Repositories are directories. Files may be sparse; nothing is held in memory. LFS files answer with a redirect to
another origin, as those of the real hub do.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1 << 20
"""Files from this size on, and all weights, are LFS files."""

PIECE = 1 << 16


@cache
def _digests(path: Path, size: int, mtime_ns: int) -> tuple[str, str]:
    """Returns SHA-256 and git's name of a file."""
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha256.update(piece)
            git.update(piece)
    return sha256.hexdigest(), git.hexdigest()


@dataclass
class Repo:
    """One repository; every file of `directory` is in every revision, but for the commits these are.

    Attributes:
        status: answered to everything, with the hub's error code, when it is not 0.
        is_gated: whether only files are refused, as those of gated repositories are; everybody sees the list.
        stalled: files that stop half-way until the server ends.
        missing: files that are listed nowhere and cannot be had.
        listed: SHA-256 that is listed instead of the true one, by file.
        cut: bytes after which the connection breaks, by file; as often as `cuts` says.
        slow: seconds before an answer.
        is_hashed: whether digests of weights are true; False lists digests of their names, for files too large to hash.
    """

    directory: Path
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    refs: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    code: str = ""
    is_gated: bool = False
    stalled: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    listed: dict[str, str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    cuts: int = 0
    slow: float = 0
    is_hashed: bool = True

    def commit_of(self, revision: str) -> str | None:
        known = {"main": self.commit, self.commit: self.commit, **self.refs}
        return known.get(revision)

    def names(self) -> list[str]:
        paths = (path for path in sorted(self.directory.rglob("*")) if path.is_file())
        names = [path.relative_to(self.directory).as_posix() for path in paths]
        return [name for name in names if name not in self.missing]

    def is_lfs(self, name: str) -> bool:
        return name.endswith(".safetensors") or (self.directory / name).stat().st_size >= LFS_BYTES

    def digests(self, name: str) -> tuple[str, str]:
        path = self.directory / name
        if not self.is_hashed and name.endswith(".safetensors"):
            sha256, git = hashlib.sha256(name.encode()).hexdigest(), hashlib.sha1(name.encode()).hexdigest()
        else:
            status = path.stat()
            sha256, git = _digests(path, status.st_size, status.st_mtime_ns)
        return self.listed.get(name, sha256), git

    def sibling(self, name: str) -> dict[str, Any]:
        size = (self.directory / name).stat().st_size
        sha256, git = self.digests(name)
        found: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git}
        if self.is_lfs(name):
            found["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 135}
        return found


class Hub:
    """The servers of the interface and of LFS files.

    `requests` are (method, path, bytes sent) in order, `authorized` the paths of those that carried a token.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.authorized: list[str] = []
        self.lock, self.closing, self.stalled = threading.Lock(), threading.Event(), threading.Event()
        hub = self

        class Handler(_Handler):
            owner = hub

        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in self.servers)
        self.threads = [
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in self.servers
        ]
        for thread in self.threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.requests)

    def paths(self, part: str) -> list[str]:
        """Returns the path of every request that has a part in it."""
        return [path for _, path, _ in self.requests if part in path]

    def close(self) -> None:
        self.closing.set()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def serving(**repos: Repo) -> Iterator[Hub]:
    """Serves repositories `o/NAME` inside the block."""
    hub = Hub()
    hub.repos = {f"o/{name}": repo for name, repo in repos.items()}
    try:
        yield hub
    finally:
        hub.close()


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_CONNECT(self) -> None:
        """Refuses, as a proxy."""
        self._error(403, "", "not through here")

    def log_message(self, *_: object) -> None:
        """Keeps quiet."""

    def _answer(self) -> None:
        self.sent = 0
        path = unquote(urlsplit(self.path).path)
        try:
            self._route(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.owner.lock:
                self.owner.requests.append((self.command, path, self.sent))
                if "Authorization" in self.headers:
                    self.owner.authorized.append(path)

    def _route(self, path: str) -> None:
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            repo = self._repo(found[1])
            if repo and self._commit(repo, found[2] or "main"):
                siblings = [repo.sibling(name) for name in repo.names()]
                self._json({"id": found[1], "modelId": found[1], "sha": repo.commit, "siblings": siblings})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._repo(found[1])
            if repo and self._commit(repo, found[2]):
                self._resolve(found[1], repo, found[3])
        elif found := re.fullmatch(r"/lfs/([^/]+/[^/]+)/(.+)", path):
            repo = self.owner.repos[found[1]]
            self._send_file(repo, found[2], {})
        else:
            self._error(404, "", "Not Found")

    def _repo(self, name: str) -> Repo | None:
        repo = self.owner.repos.get(name)
        if repo is None:
            self._error(404, "RepoNotFound", "Repository not found")
            return None
        self.owner.closing.wait(repo.slow)
        if repo.status:
            self._error(repo.status, repo.code, "Access to model is restricted" if repo.code == "GatedRepo" else "No")
            return None
        return repo

    def _commit(self, repo: Repo, revision: str) -> bool:
        if repo.commit_of(revision) is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return False
        return True

    def _resolve(self, repo_id: str, repo: Repo, name: str) -> None:
        if name not in repo.names():
            self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.commit})
            return
        if repo.is_gated:
            self._error(403, "GatedRepo", "Access to model is restricted")
            return
        sha256, git = repo.digests(name)
        size = (repo.directory / name).stat().st_size
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{git}"'}
        if not repo.is_lfs(name):
            self._send_file(repo, name, headers)
            return
        location = f"{self.owner.storage}/lfs/{repo_id}/{name}"
        linked = {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{sha256}"', "Location": location}
        self._head(302, headers | linked | {"Content-Length": "0"})

    def _send_file(self, repo: Repo, name: str, headers: Mapping[str, str]) -> None:
        path = repo.directory / name
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end, status = int(wanted[1]), min(size, int(wanted[2] or size - 1) + 1), 206
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        self._head(status, {**headers, "Accept-Ranges": "bytes", "Content-Length": str(end - begin)})
        if self.command == "HEAD":
            return
        stop = end
        if name in repo.cut and repo.cuts > 0 and begin <= repo.cut[name] < end:
            repo.cuts -= 1
            stop = repo.cut[name]
            self.close_connection = True
        with path.open("rb") as file:
            file.seek(begin)
            while begin < stop:
                piece = file.read(min(PIECE, stop - begin))
                self.wfile.write(piece)
                self.sent += len(piece)
                begin += len(piece)
                if name in repo.stalled and begin > size // 2:
                    self.owner.stalled.set()
                    self.owner.closing.wait()

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)
            self.sent += len(body)

    def _error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        extra = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._head(status, {**extra, **(headers or {}), "Content-Length": "0"})

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


def client_environment(hub: Hub | None, home: Path, **changes: str) -> dict[str, str]:
    """Returns the variables that point the real client at a hub, with a cache of its own and no other network."""
    endpoint = hub.endpoint if hub else "http://127.0.0.1:9"
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "*",
        **changes,
    }
