"""A Hub on this machine that the real huggingface_hub talks to through HF_ENDPOINT: repositories to download.

The calls are those huggingface_hub 2.4 makes; nothing of the client is replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class LoopbackHub:
    """Serves directories as repositories.

    Attributes:
        repositories: directory of each repository id.
        revisions: names that resolve to COMMIT.
        refuse: repository id -> (status, X-Error-Code) to answer instead.
        requests: how often each path was asked for with each method.
        sent: bytes of all answers.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.revisions = {"main", "v1", COMMIT}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.requests: Counter[str] = Counter()
        self.sent = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests[f"{self.command} {path}"] += 1
                info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?", path)
                file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                found = info or file
                if found is None or (found[1] not in hub.repositories and found[1] not in hub.refuse):
                    return self.fail(404, "RepoNotFound")
                if found[1] in hub.refuse:
                    return self.fail(*hub.refuse[found[1]])
                if (found[2] or "main") not in hub.revisions:
                    return self.fail(404, "RevisionNotFound")
                root = hub.repositories[found[1]]
                if info:
                    sizes = {p.relative_to(root).as_posix(): p.stat().st_size for p in root.rglob("*") if p.is_file()}
                    answer: object = {
                        "id": found[1],
                        "sha": COMMIT,
                        "siblings": [{"rfilename": name} for name in sizes],
                    }
                    if "/tree/" in path:
                        answer = [{"type": "file", "path": n, "size": s, "oid": COMMIT} for n, s in sizes.items()]
                    return self.send(json.dumps(answer).encode(), {"Content-Type": "application/json"})
                if not (root / found[3]).is_file():
                    return self.fail(404, "EntryNotFound")
                data = (root / found[3]).read_bytes()
                etag = hashlib.sha256(data).hexdigest()
                return self.send(data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

            def send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                if asked:
                    end = min(int(asked[2] or len(data) - 1), len(data) - 1)
                    headers["Content-Range"] = f"bytes {asked[1]}-{end}/{len(data)}"
                    data, status = data[int(asked[1]) : end + 1], 206
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    hub.sent += len(data)
                    self.wfile.write(data)

            def do_POST(self) -> None:
                """What is known of some paths: the only question that huggingface_hub posts here."""
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", unquote(urlsplit(self.path).path))
                if asked is None:
                    return self.fail(404, "RepoNotFound")
                root = hub.repositories[asked[1]]
                sizes = {
                    path: (root / path).stat().st_size for path in json.loads(body)["paths"] if (root / path).is_file()
                }
                found = [{"type": "file", "path": path, "size": size, "oid": COMMIT} for path, size in sizes.items()]
                return self.send(json.dumps(found).encode(), {"Content-Type": "application/json"})

            def fail(self, status: int, code: str) -> None:
                self.send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
