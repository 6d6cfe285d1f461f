"""A stand-in for sign-in and the Jobs API of the Hub, on a LoopbackHub, and a server for a built static Space.

The paths, the payload and the answers are those of huggingface_hub 2.4 (hf_api.py, _jobs_api.py). Of a job the test says
what it logs and how it ends. A sign-in is
OAuth with PKCE, as huggingface.co describes it for static Spaces; who authorizes it is not asked.
"""

import base64
import functools
import hashlib
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from .loopback_hub import DATE, ROUTES, USER, LoopbackHub, Refused

TOKEN = "hf_oauth_0123456789abcdef"
HARDWARE = [
    {"name": name, "prettyName": pretty, "cpu": cpu, "ram": ram, "ephemeralStorage": disk, "accelerator": card,
     "unitCostMicroUSD": round(cost * 1e6), "unitCostUSD": cost, "unitLabel": "minute"}
    for name, pretty, cpu, ram, disk, cost, card in (
        ("t4-small", "Nvidia T4 - small", "4 vCPU", "15 GB", "50 GB", 0.0001, {"model": "T4"}),
        ("cpu-upgrade", "CPU Upgrade", "8 vCPU", "32 GB", "50 GB", 0.0005, None),
        ("cpu-basic", "CPU Basic", "2 vCPU", "16 GB", "20 GB", 0.000167, None),
    )
]  # fmt: skip


class Job:
    """A job: its payload, and what a test says of it.

    Attributes:
        payload: what was posted.
        lines: its log.
        stage: one of huggingface_hub's JobStage.
    """

    def __init__(self, number: int, payload: dict) -> None:
        self.id = f"{number:024x}"
        self.payload = payload
        self.lines = ["===== Job started at 2026-01-01 00:00:00 ====="]
        self.stage = "SCHEDULING"
        self.changed = threading.Condition()

    @property
    def info(self) -> dict:
        """What the API tells of it: never a secret's value."""
        shown = {name: value for name, value in self.payload.items() if name not in ("secrets", "timeoutSeconds")}
        return {
            **shown, "id": self.id, "createdAt": DATE, "status": {"stage": self.stage, "message": None},
            "secrets": dict.fromkeys(self.payload["secrets"], None), "owner": {"id": "1", "name": USER, "type": "user"},
            "durations": {"schedulingSecs": 0, "runningSecs": 1, "totalSecs": 1},
        }  # fmt: skip

    def add(self, line: str) -> None:
        with self.changed:
            self.lines.append(line)
            self.changed.notify_all()

    def turn(self, stage: str) -> None:
        with self.changed:
            self.stage = stage
            self.changed.notify_all()


class LoopbackJobs:
    """The sign-in and the jobs of a LoopbackHub.

    Attributes:
        hub: the Hub.
        jobs: all jobs that were started.
        authorized: the queries of /oauth/authorize.
        denied: whether the visitor declines.
    """

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub = hub
        self.jobs: list[Job] = []
        self.authorized: list[dict[str, str]] = []
        self.codes: dict[str, dict[str, str]] = {}
        self.denied = False
        hub.jobs = self

    def find(self, number: str) -> Job:
        found = next((job for job in self.jobs if job.id == number), None)
        if found is None:
            raise Refused(404, message="Job not found")
        return found


def _admitted(handler) -> LoopbackJobs:
    if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
        raise Refused(401, message="Invalid username or password.")
    return handler.hub.jobs


def _authorize(handler) -> None:
    jobs, query = handler.hub.jobs, {name: values[0] for name, values in handler.query.items()}
    jobs.authorized.append(query)
    code = f"code-{len(jobs.authorized)}"
    jobs.codes[code] = query
    given = {"error": "access_denied"} if jobs.denied else {"code": code}
    raise Refused(302, Location=f"{query['redirect_uri']}?{urlencode({**given, 'state': query['state']})}")


def _token(handler) -> None:
    form = {name: values[0] for name, values in parse_qs(handler.body().decode()).items()}
    asked = handler.hub.jobs.codes.pop(form["code"], None)
    hashed = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).decode().rstrip("=")
    sound = asked is not None and asked["code_challenge"] == hashed and asked["code_challenge_method"] == "S256"
    if not sound or any(form[name] != asked[name] for name in ("client_id", "redirect_uri")):
        raise Refused(400, message="invalid_grant")
    handler.say({"access_token": TOKEN, "token_type": "bearer", "expires_in": 28800})


def _hardware(handler) -> None:
    handler.say(HARDWARE)


def _list(handler) -> None:
    jobs, (label,) = _admitted(handler), handler.query["label"]
    name, _, value = label.partition("=")
    found = [job for job in jobs.jobs if job.stage in handler.query["stage"] and job.payload["labels"][name] == value]
    handler.say([job.info for job in found])


def _start(handler) -> None:
    jobs = _admitted(handler)
    job = Job(len(jobs.jobs) + 1, json.loads(handler.body()))
    jobs.jobs.append(job)
    handler.say(job.info)


def _inspect(handler, number: str) -> None:
    handler.say(_admitted(handler).find(number).info)


def _cancel(handler, number: str) -> None:
    _admitted(handler).find(number).turn("CANCELED")
    handler.say({})


def _logs(handler, number: str) -> None:
    job = _admitted(handler).find(number)
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    sent = 0
    while True:
        with job.changed:
            lines, stage = job.lines[sent:], job.stage
            if not lines and stage in ("SCHEDULING", "RUNNING"):
                job.changed.wait(0.5)
        for line in lines:
            # A line each second.
            time = f"2026-01-01T00:{sent // 60 % 60:02}:{sent % 60:02}.000Z"
            handler.wfile.write(f"data: {json.dumps({'data': line, 'timestamp': time})}\n\n".encode())
            sent += 1
        if not lines:
            handler.wfile.write(b": keep-alive\n\n")
            if stage not in ("SCHEDULING", "RUNNING"):
                return


JOB = f"/api/jobs/{USER}/(?P<number>[0-9a-f]{{24}})"
ROUTES[:0] = [
    (("GET",), "/oauth/authorize", False, _authorize),
    (("POST",), "/oauth/token", False, _token),
    (("GET",), "/api/jobs/hardware", False, _hardware),
    (("GET",), f"/api/jobs/{USER}", False, _list),
    (("POST",), f"/api/jobs/{USER}", False, _start),
    (("GET",), JOB, False, _inspect),
    (("GET",), f"{JOB}/logs", False, _logs),
    (("POST",), f"{JOB}/cancel", False, _cancel),
]


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *_: object) -> None: ...


class SpaceServer:
    """Serves a built Space on loopback, as its context.

    Attributes:
        address: where it is.
    """

    def __init__(self, directory: Path) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(directory)))
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def __enter__(self) -> "SpaceServer":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
