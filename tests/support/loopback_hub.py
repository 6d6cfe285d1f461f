"""A Hub on this machine that the real huggingface_hub talks to: repositories to download from and to upload to.

The calls are those huggingface_hub 2.4 makes without Xet (HF_HUB_DISABLE_XET=1); nothing of the client is replaced.
What a client can tell is as on huggingface.co: a new repository holds a .gitattributes, safetensors files are LFS files
whose ETag is their sha256, all other files are regular ones whose ETag is their git object id, and the address of an
LFS upload is signed, so it is used without a token.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
DATE = "2026-01-01T00:00:00.000Z"
PIECE = 1 << 16
USER = "user"


@dataclass
class Fault:
    """What goes wrong with some requests.

    The first fault of the list whose turn it is acts alone; requests that an earlier fault took are not counted here.

    Attributes:
        path: regular expression searched for in the unquoted path.
        method: the only method meant, or None for all (HEAD and GET are two).
        times: how many requests it meets, or None for all.
        after: how many matching requests pass unharmed first.
        status: answer this instead, with X-Error-Code `code`.
        message: with `status`, the reason that the answer gives.
        body: with `status`, the answer's JSON; one with the reason if None.
        delay: seconds to wait first.
        call: run before the request is carried out; with `cut` or `cut_upload`, when those bytes have gone.
        cut: hang up after so many bytes of the answer's body. The request was carried out, so cut=0 loses an answer.
        cut_upload: hang up after so many bytes of the request's body, or at once where it has none; it is not carried out.
        short: send only so many bytes of the body and announce that length.
        flip: send the byte at this position of the file inverted.
        content: another content where the file is downloaded, with the ETag that goes with it.
    """

    path: str
    method: str | None = None
    times: int | None = 1
    after: int = 0
    status: int | None = None
    code: str = ""
    message: str = ""
    body: object = None
    delay: float = 0
    call: Callable[[], object] | None = None
    cut: int | None = None
    cut_upload: int | None = None
    short: int | None = None
    flip: int | None = None
    content: bytes | None = None
    seen: int = 0

    def meets(self, method: str, path: str) -> bool:
        """Whether this request is one of its own; counts it."""
        if self.method not in (None, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        return self.seen > self.after and (self.times is None or self.seen <= self.after + self.times)


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message or code}
        self.headers |= {name.replace("_", "-"): value for name, value in headers.items()}


class LoopbackHub:
    """Repositories behind HF_ENDPOINT: directories to read, and those that clients create and commit to.

    Attributes:
        repositories: directory of each read-only repository.
        refuse: repository id -> (status, X-Error-Code) to answer instead.
        faults: what goes wrong; see Fault.
        role: of the token, as whoami tells it; nothing but "write" may write.
        token: when set, private repositories and all writes need it.
        requests: how often each path was asked for with each method, faults included.
        sent: bytes of all answers.
        uploads: how often each sha256 was stored by an LFS upload.
        storage: when set, where LFS files lie (another origin that leads here): their addresses are redirected there.
        leaked: requests to the storage that brought a token along.
        kept_bytes: how much of an LFS upload is stored, the rest being zeros that take no disk; None for all.
        latency: seconds before each answer.
        rate: bytes of files a second on each connection, None for as fast as it goes.
    """

    def __init__(self, directory: Path, token: str | None = None) -> None:
        self.repositories: dict[str, Path] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.faults: list[Fault] = []
        self.role = "write"
        self.token = token
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self.uploads: Counter[str] = Counter()
        self.storage: str | None = None
        self.leaked: list[str] = []
        self.kept_bytes: int | None = None
        self.latency = 0.0
        self.rate: float | None = None
        self.errors: list[Exception] = []
        self.lock = threading.RLock()
        self.blobs = directory / "blobs"
        self.blobs.mkdir(parents=True, exist_ok=True)
        # Of each repository that clients made: private, refs (name -> commit) and commits (each with all its files).
        self.stored: dict[str, dict[str, Any]] = {}
        self.hashes: dict[tuple[Path, int, int], tuple[str, str]] = {}
        self.server = Server(self)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LoopbackHub:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.server.hang_up()
        self.thread.join()
        if self.errors and kind is None:
            raise self.errors[0]

    def files(self, repo: str, rev: str = "main") -> dict[str, Path]:
        """Where the content of each file of a revision lies."""
        return self.snapshot(repo, rev)[1]

    def commits(self, repo: str, rev: str = "main") -> list[tuple[str, list[str]]]:
        """Title and added paths of each commit, the first one first."""
        found, sha = [], self.snapshot(repo, rev)[0]
        while sha:
            commit = self.stored[repo]["commits"][sha]
            found.append((commit["title"], commit["added"]))
            sha = commit["parent"]
        return found[::-1]

    def snapshot(self, repo: str, rev: str) -> tuple[str, dict[str, Path]]:
        """The commit that a revision stands for and its files."""
        if repo in self.repositories:
            root = self.repositories[repo]
            if rev not in ("main", "v1", COMMIT):
                raise Refused(404, "RevisionNotFound")
            return COMMIT, {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}
        with self.lock:
            if repo not in self.stored:
                raise Refused(404, "RepoNotFound")
            stored = self.stored[repo]
            sha = stored["refs"].get(rev, rev)
            if sha not in stored["commits"]:
                raise Refused(404, "RevisionNotFound")
            return sha, {path: self.blobs / digest for path, digest in stored["commits"][sha]["files"].items()}

    def create(self, repo: str, private: bool) -> None:
        """Make a repository as the Hub does: its first commit tells git which files are LFS files."""
        with self.lock:
            if repo in self.stored or repo in self.repositories:
                raise Refused(409, message="You already created this model repo")
            self.stored[repo] = {"private": private, "refs": {}, "commits": {}}
            attributes = self.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            self.commit(repo, "main", "initial commit", {".gitattributes": attributes}, [])

    def commit(self, repo: str, ref: str, title: str, added: dict[str, str], deleted: list[str]) -> str:
        """Move a ref on by one commit; `added` maps paths to sha256."""
        with self.lock:
            stored = self.stored[repo]
            parent = stored["refs"].get(ref)
            files = dict(stored["commits"][parent]["files"]) if parent else {}
            for path in deleted:
                files.pop(path, None)
            commit = {"title": title, "parent": parent, "added": list(added), "files": files | added}
            sha = hashlib.sha1(json.dumps([len(stored["commits"]), commit]).encode()).hexdigest()
            stored["commits"][sha] = commit
            stored["refs"][ref] = sha
            return sha

    def store(self, content: bytes) -> str:
        """Keep a regular file's content and return its sha256."""
        digest = hashlib.sha256(content).hexdigest()
        # A reader of the same content may have it open.
        if not (self.blobs / digest).exists():
            (self.blobs / digest).write_bytes(content)
        return digest

    def describe(self, path: str, content: Path) -> dict[str, Any]:
        """A file as the tree lists it."""
        stat = content.stat()
        key = (content, stat.st_size, stat.st_mtime_ns)
        if key not in self.hashes:
            with content.open("rb") as file:
                self.hashes[key] = hashes(file, stat.st_size)
        sha256, oid = self.hashes[key]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": stat.st_size, "oid": oid}
        if is_lfs(path):
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {stat.st_size}\n".encode()
            entry["oid"] = hashes(io.BytesIO(pointer), len(pointer))[1]
            entry["lfs"] = {"oid": sha256, "size": stat.st_size, "pointerSize": len(pointer)}
        return entry


def is_lfs(path: str) -> bool:
    """Whether git keeps a pointer to the file instead of the file."""
    return path.endswith(".safetensors")


def hashes(file: BinaryIO, size: int) -> tuple[str, str]:
    """Sha256 and git object id of a file."""
    sha256, oid = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
    while piece := file.read(PIECE):
        sha256.update(piece)
        oid.update(piece)
    return sha256.hexdigest(), oid.hexdigest()


class Server(ThreadingHTTPServer):
    """Knows its open connections: clients keep them open, and a server that stopped must not answer there."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self.connections: set[socket.socket] = set()
        self.closed = threading.Condition()
        super().__init__(("127.0.0.1", 0), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a new connection in a thread of its own."""
        with self.closed:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.closed:
            self.connections.discard(request)
            self.closed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may end a connection whenever it likes, as a killed one does."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        with self.closed:
            for connection in self.connections:
                # A client may have ended it by itself.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.closed.wait_for(lambda: not self.connections, timeout=5)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two packets; without this the second one waits for the client's acknowledgement.
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: object) -> None: ...

    def end_headers(self) -> None:
        """Let pages of other origins read the answer, as huggingface.co does; they send no cookies along."""
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Access-Control-Expose-Headers", "*")
        super().end_headers()

    def do_OPTIONS(self) -> None:
        """Answer what a browser asks before a request of another origin."""
        self.send_response(204)
        self.send_header("Access-Control-Allow-Methods", "GET, POST")
        self.send_header("Access-Control-Allow-Headers", "Authorization, Content-Type, Range, Accept")
        self.send_header("Access-Control-Max-Age", "600")
        self.end_headers()

    def answer(self) -> None:
        """Carry out the request, or what the fault it meets says."""
        self.hub = hub = self.server.hub
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.length = self.unread = int(self.headers.get("Content-Length") or 0)
        with hub.lock:
            path = unquote(url.path)
            hub.requests[f"{self.command} {path}"] += 1
            self.fault = next((fault for fault in hub.faults if fault.meets(self.command, path)), Fault(""))
        try:
            time.sleep(self.fault.delay + hub.latency)
            if self.fault.call and self.fault.cut is None and self.fault.cut_upload is None:
                self.fault.call()
            if self.fault.status:
                raise Refused(self.fault.status, self.fault.code, self.fault.message)
            if self.fault.cut_upload is not None and not self.length:
                self.hang_up()
            for methods, pattern, writes, action in ROUTES:
                if self.command in methods and (found := re.fullmatch(pattern, url.path)):
                    given = {name: unquote(value or "") for name, value in found.groupdict().items()}
                    self.admit(given.get("repo", ""), writes)
                    return action(self, **given)
            # No repository has a name without an owner here.
            raise Refused(
                404, "RepoNotFound" if re.match(r"/api/models/[^/]+(/revision/|$)", url.path) else "", "Not Found"
            )
        except Refused as refused:
            self.refuse(refused)
        except ConnectionError:
            # The client went away, or a fault hangs up.
            self.close_connection = True
        except Exception as error:
            hub.errors.append(error)
            self.close_connection = True

    def admit(self, repo: str, writes: bool) -> None:
        """Refuse who may not read or write here."""
        if repo in self.hub.refuse:
            raise Refused(*self.hub.refuse[repo])
        given = self.headers.get("Authorization")
        if self.hub.token and given and given != f"Bearer {self.hub.token}":
            raise Refused(401, message="Invalid credentials in Authorization header")
        if self.hub.token and not given and (writes or self.hub.stored.get(repo, {}).get("private")):
            # By the code the client sees here what it sees by the address of huggingface.co: RepositoryNotFoundError.
            raise Refused(401, "RepoNotFound" if repo else "", "Invalid username or password.")
        if writes and self.hub.role != "write":
            raise Refused(403, message="Forbidden: you must use a write token to upload to a repository.")
        if writes and repo in self.hub.repositories:
            raise Refused(403, message=f"{repo} is read-only")

    def received(self) -> Iterator[bytes]:
        """The request's body, piece by piece."""
        end = 0 if self.fault.cut_upload is None else max(0, self.length - self.fault.cut_upload)
        while self.unread > end:
            piece = self.rfile.read(min(PIECE, self.unread - end))
            if not piece:
                raise ConnectionAbortedError("the client went away in the middle of its request")
            self.unread -= len(piece)
            yield piece
        if self.fault.cut_upload is not None:
            self.hang_up()

    def body(self) -> bytes:
        return b"".join(self.received())

    def hang_up(self) -> None:
        """Do what the fault says when its bytes have gone."""
        if self.fault.call:
            self.fault.call()
        raise ConnectionAbortedError("a fault hangs up")

    def refuse(self, refused: Refused) -> None:
        # A client that is still sending its body would not read the answer.
        for _ in self.received():
            pass
        body = {"error": refused.headers["X-Error-Message"]} if self.fault.body is None else self.fault.body
        self.say(body, refused.status, refused.headers)

    def say(self, answer: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON."""
        data = json.dumps(answer).encode()
        self.send(io.BytesIO(data), 0, len(data), status, {"Content-Type": "application/json", **(headers or {})})

    def send(self, body: BinaryIO, start: int, end: int, status: int, headers: dict[str, str]) -> None:
        """Answer with a part of a file, harmed as the fault says."""
        if self.fault.short is not None:
            end = min(end, start + self.fault.short)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(end - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.cut is not None:
            end = min(end, start + self.fault.cut)
        begun, first = time.monotonic(), start
        if isinstance(body, io.BufferedReader) and self.fault.flip is None:
            while start < end:
                # Within the kernel, so that this server is not what a client waits for.
                count = os.sendfile(self.connection.fileno(), body.fileno(), start, min(1 << 20, end - start))
                start += count
                with self.hub.lock:
                    self.hub.sent += count
                if self.hub.rate:
                    time.sleep(max(0, begun + (start - first) / self.hub.rate - time.monotonic()))
        body.seek(start)
        while start < end:
            piece = bytearray(body.read(min(PIECE, end - start)))
            if self.fault.flip is not None and start <= self.fault.flip < start + len(piece):
                piece[self.fault.flip - start] ^= 0xFF
            self.wfile.write(piece)
            start += len(piece)
            with self.hub.lock:
                self.hub.sent += len(piece)
        if self.fault.cut is not None:
            self.hang_up()

    # What is known of users and repositories.

    def whoami(self) -> None:
        if self.hub.token and not self.headers.get("Authorization"):
            raise Refused(401, message="Invalid username or password.")
        self.say({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": self.hub.role}}})

    def allow(self, repo: str) -> None:
        """Say that the client may do what it asks about; who may not does not get here."""
        self.hub.snapshot(repo, "main")
        self.say({})

    def info(self, repo: str, revision: str = "") -> None:
        sha, files = self.hub.snapshot(repo, revision or "main")
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in files]
        if "blobs" in self.query:
            for sibling, entry in zip(siblings, (self.hub.describe(*file) for file in files.items()), strict=True):
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {**entry["lfs"], "sha256": entry["lfs"]["oid"]}
        private = self.hub.stored.get(repo, {}).get("private", False)
        self.say({"id": repo, "sha": sha, "private": private, "siblings": siblings})

    def search(self) -> None:
        """The repositories of an author, or of any, whose names have a text in them in any case, private ones only for who has the token."""
        known = {**dict.fromkeys(self.hub.repositories, False)}
        known |= {repo: bool(stored["private"]) for repo, stored in self.hub.stored.items()}
        allowed = not self.hub.token or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        text, most = self.query.get("search", [""])[0], int(self.query.get("limit", ["20"])[0])
        author = self.query.get("author", [""])[0]
        mine = (name for name in sorted(known) if name.startswith(f"{author}/" if author else ""))
        found = [name for name in mine if text.lower() in name.lower() and (allowed or not known[name])]
        self.say([{"id": name, "private": known[name]} for name in found[:most]])

    # Files to download.

    def tree(self, repo: str, revision: str) -> None:
        files = self.hub.snapshot(repo, revision)[1]
        self.say([self.hub.describe(name, content) for name, content in files.items()])

    def paths_info(self, repo: str, revision: str) -> None:
        files = self.hub.snapshot(repo, revision)[1]
        body = self.body().decode()
        in_json = self.headers.get_content_type() == "application/json"
        asked = json.loads(body)["paths"] if in_json else parse_qs(body).get("paths", [])
        self.say([self.hub.describe(path, files[path]) for path in asked if path in files])

    def resolve(self, repo: str, revision: str, path: str) -> None:
        sha, files = self.hub.snapshot(repo, revision)
        if path not in files:
            raise Refused(404, "EntryNotFound", X_Repo_Commit=sha)
        entry = self.hub.describe(path, files[path])
        size, etag = entry["size"], entry.get("lfs", entry)["oid"]
        if self.fault.content is not None:
            size = len(self.fault.content)
            etag = hashes(io.BytesIO(self.fault.content), size)[0 if is_lfs(path) else 1]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if is_lfs(path):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size)}
        if is_lfs(path) and self.hub.storage:
            address = f"{self.hub.storage}/storage/{repo}/{sha}/{quote(path)}?Signature=signed"
            return self.send(io.BytesIO(), 0, 0, 302, {**headers, "Location": address})
        self.contents(files[path], size, headers)

    def stored(self, repo: str, revision: str, path: str) -> None:
        """An LFS file by its signed address."""
        if self.headers.get("Authorization"):
            self.hub.leaked.append(self.path)
        if self.query.get("Signature") != ["signed"]:
            raise Refused(403, message="Request has expired")
        content = self.hub.snapshot(repo, revision)[1][path]
        size = content.stat().st_size if self.fault.content is None else len(self.fault.content)
        self.contents(content, size, {"Accept-Ranges": "bytes"})

    def contents(self, content: Path, size: int, headers: dict[str, str]) -> None:
        """What is asked for of a file."""
        start, end, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end, status = int(asked[1]), min(int(asked[2] or size) + 1, size), 206
            if start >= size:
                raise Refused(416, message="Range Not Satisfiable", Content_Range=f"bytes */{size}")
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with content.open("rb") if self.fault.content is None else io.BytesIO(self.fault.content) as body:
            self.send(body, start, end, status, headers)

    # Uploads.

    def create(self) -> None:
        asked = json.loads(self.body())
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        known = {"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": repo}
        try:
            self.hub.create(repo, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        except Refused as refused:
            # Where the caller lets it exist, the client reads the address from this answer too.
            return self.say({**known, "error": refused.headers["X-Error-Message"]}, refused.status, refused.headers)
        self.say(known)

    def validate(self) -> None:
        self.body()
        self.say({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        sha, files = self.hub.snapshot(repo, revision)
        answers = []
        for path in (asked["path"] for asked in json.loads(self.body())["files"]):
            entry: dict[str, Any] = self.hub.describe(path, files[path]) if path in files else {"oid": None}
            answer = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular", "shouldIgnore": False}
            answers.append({**answer, "oid": entry.get("lfs", entry)["oid"]})
        self.say({"files": answers, "commitOid": sha})

    def batch(self, repo: str) -> None:
        self.hub.snapshot(repo, "main")
        objects = []
        for asked in json.loads(self.body())["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if not (self.hub.blobs / asked["oid"]).exists():
                upload = f"{self.hub.endpoint}/lfs/{asked['oid']}?size={asked['size']}"
                verify = f"{self.hub.endpoint}/{repo}.git/info/lfs/objects/verify"
                answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(answer)
        self.say({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        """Take an LFS object: whole and as announced, or not at all."""
        beside = self.hub.blobs / f"{oid}.{uuid.uuid4().hex}"
        digest = hashlib.sha256()
        try:
            with beside.open("wb") as file:
                for piece in self.received():
                    digest.update(piece)
                    if self.hub.kept_bytes is None or file.tell() < self.hub.kept_bytes:
                        file.write(piece)
                file.truncate(self.length)
            if [str(self.length)] != self.query["size"] or digest.hexdigest() != oid:
                raise Refused(400, message=f"{oid} was announced, {digest.hexdigest()} of {self.length} bytes came")
            os.replace(beside, self.hub.blobs / oid)
            with self.hub.lock:
                self.hub.uploads[oid] += 1
        finally:
            beside.unlink(missing_ok=True)
        self.say({})

    def verify(self, repo: str) -> None:
        asked = json.loads(self.body())
        blob = self.hub.blobs / asked["oid"]
        if not blob.exists() or blob.stat().st_size != asked["size"]:
            raise Refused(404, message=f"{asked['oid']} was not uploaded to {repo}")
        self.say({})

    def commit(self, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines()]
        with self.hub.lock:
            sha, _ = self.hub.snapshot(repo, revision)
            header, added, deleted = lines[0]["value"], {}, []
            if header.get("parentCommit") not in (None, sha):
                raise Refused(412, message="A commit has happened since. Please refresh and try again.")
            for kind, value in ((line["key"], line["value"]) for line in lines[1:]):
                if kind == "file":
                    added[value["path"]] = self.hub.store(base64.b64decode(value["content"]))
                elif kind == "lfsFile":
                    if not (self.hub.blobs / value["oid"]).exists():
                        raise Refused(400, message=f"the LFS object {value['oid']} of {value['path']} is missing")
                    added[value["path"]] = value["oid"]
                else:
                    deleted.append(value["path"])
            if revision not in self.hub.stored[repo]["refs"]:
                raise Refused(404, "RevisionNotFound")
            commit = self.hub.commit(repo, revision, header["summary"], added, deleted)
        address = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        self.say({"success": True, "hookOutput": "", "commitOid": commit, "commitUrl": address})

    def discuss(self, repo: str) -> None:
        """Open a pull request that has no commit yet."""
        self.body()
        with self.hub.lock:
            sha, _ = self.hub.snapshot(repo, "main")
            requests = self.hub.stored[repo].setdefault("requests", [])
            requests.append({"status": "draft"})
            self.hub.stored[repo]["refs"][f"refs/pr/{len(requests)}"] = sha
        self.say({"num": len(requests)})

    def discussions(self, repo: str) -> None:
        """The pull requests, of which none matters."""
        self.hub.snapshot(repo, "main")
        self.say({"discussions": [], "count": 0, "start": 0})

    def discussion(self, repo: str, number: str) -> None:
        self.hub.snapshot(repo, f"refs/pr/{number}")
        status = self.hub.stored[repo]["requests"][int(number) - 1]["status"]
        found = {"num": int(number), "title": "", "author": {"name": USER}, "status": status, "createdAt": DATE}
        found |= {"isPullRequest": True, "repo": {"name": repo, "type": "model"}, "events": []}
        self.say({**found, "filesWithConflicts": [], "changes": {"base": "refs/heads/main"}})

    def change_status(self, repo: str, number: str) -> None:
        status = json.loads(self.body())["status"]
        self.hub.snapshot(repo, f"refs/pr/{number}")
        self.hub.stored[repo]["requests"][int(number) - 1]["status"] = status
        event = {"id": "1", "type": "status-change", "createdAt": DATE, "author": {"name": USER}}
        self.say({"newStatus": {**event, "data": {"status": status}}})


REPO = r"(?P<repo>[^/]+/[^/]+)"
# HfFileSystem leaves the slashes of refs/pr/1 unquoted, the rest of the client quotes them.
REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
# Methods, path, whether it writes (and so needs the token), and what answers it.
ROUTES: list[tuple[tuple[str, ...], str, bool, Callable[..., None]]] = [
    (("GET",), "/api/whoami-v2", False, Handler.whoami),
    (("GET",), "/api/models", False, Handler.search),
    (("GET",), f"/api/models/{REPO}", False, Handler.info),
    (("GET",), f"/api/models/{REPO}/revision/{REVISION}", False, Handler.info),
    (("GET",), f"/api/models/{REPO}/auth-check", False, Handler.allow),
    (("GET",), f"/api/models/{REPO}/auth-check/write", True, Handler.allow),
    (("GET",), f"/api/models/{REPO}/tree/{REVISION}", False, Handler.tree),
    (("POST",), f"/api/models/{REPO}/paths-info/{REVISION}", False, Handler.paths_info),
    (("GET",), f"/storage/{REPO}/{REVISION}/(?P<path>.+)", False, Handler.stored),
    (("GET", "HEAD"), f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", False, Handler.resolve),
    (("POST",), "/api/repos/create", True, Handler.create),
    (("POST",), "/api/validate-yaml", False, Handler.validate),
    (("POST",), f"/api/models/{REPO}/preupload/{REVISION}", True, Handler.preupload),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", True, Handler.batch),
    (("PUT",), "/lfs/(?P<oid>[0-9a-f]{64})", False, Handler.upload),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/verify", True, Handler.verify),
    (("POST",), f"/api/models/{REPO}/commit/{REVISION}", True, Handler.commit),
    (("GET",), f"/api/models/{REPO}/discussions", False, Handler.discussions),
    (("POST",), f"/api/models/{REPO}/discussions", True, Handler.discuss),
    (("GET",), f"/api/models/{REPO}/discussions/(?P<number>\\d+)", False, Handler.discussion),
    (("POST",), f"/api/models/{REPO}/discussions/(?P<number>\\d+)/status", True, Handler.change_status),
]
for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
    setattr(Handler, f"do_{method}", Handler.answer)
