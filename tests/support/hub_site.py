"""A loopback Hub with a source and an output beside it, and commands that ask that Hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from conftest import ROOT, tree

from .loopback_hub import LoopbackHub
from .starting import Command, finish, forked

SCRIPT = ROOT / "openquant" / "__main__.py"
TOKEN = "hf_secretsecret"
# Code for a command that tries again after a while, of which these tests need a twentieth.
SHORT_WAITS = "import time\nwait = time.sleep\ntime.sleep = lambda seconds: wait(seconds / 20)"
# What differs between a run on files and one on a repository that has them.
NAMES_ITS_SOURCE = ("README.md", ".openquant.json")


class Site:
    """To be used as the context of its Hub.

    Attributes:
        hub: the Hub.
        root: the directory of all that belongs to it.
        source: a copy of the model that was given, if one was.
        out: where an output is to go.
        cwd: where commands run.
    """

    def __init__(self, root: Path, model: Path | None = None, token: str | None = TOKEN) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.out = root, root / "out"
        self.source = shutil.copytree(model, root / "source") if model else root / "source"
        self.cwd = ROOT
        self.token = token
        self.hub = LoopbackHub(root / "hub", token=token)

    def __enter__(self) -> Site:
        self.hub.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.hub.__exit__(*raised)  # type: ignore[arg-type]

    def begin(self, *words: object, before: str = "", **environment: str) -> Command:
        """An openquant verb against the Hub, started; the code `before` is run first."""
        settings = {**self.environment, **environment}
        return forked(SCRIPT, *words, cwd=self.cwd, environment=settings, before=before)

    @property
    def environment(self) -> dict[str, str]:
        settings = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.root / "hf"), "HF_HUB_DISABLE_XET": "1"}
        return {**os.environ, **settings, **({"HF_TOKEN": self.token} if self.token else {})}

    def fresh(self, *words: object, before: str = "") -> subprocess.CompletedProcess[str]:
        """The same in a process that has imported nothing before: how the client logs is settled as it is imported."""
        code = f"{before}\nimport runpy\nrunpy.run_module('openquant', run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120)

    def ask(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return finish(self.begin(*words, **environment))

    def works(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        done = self.ask(*words, **environment)
        assert done.returncode == 0, done.stderr
        return done

    def refused(self, *words: object, **environment: str) -> list[str]:
        """The error and its hint, which end what is printed."""
        done = self.ask(*words, **environment)
        assert done.returncode == 2, done.stderr
        return done.stderr.splitlines()[-2:]

    def push(self, *more: object) -> list[object]:
        """The words that publish an output of the source as user/name."""
        return ["compress", "-m", self.source, "-o", self.out, "--push-to-hub", "user/name", *more]

    def held(self, repo: str = "user/name", revision: str = "main") -> dict[str, bytes]:
        """What a repository holds beside the .gitattributes it was made with."""
        found = self.hub.files(repo, revision)
        return {name: path.read_bytes() for name, path in found.items() if name != ".gitattributes"}

    def publish(self, root: Path, repo: str = "user/name") -> str:
        """Put a directory's files into a repository; the commit."""
        if repo not in self.hub.stored:
            self.hub.create(repo, private=False)
        added = {name: self.hub.store(data) for name, data in tree(root).items() if not name.startswith(".")}
        return self.hub.commit(repo, "main", "weights", added, deleted=[])


def without_origin(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a run writes, but the two files that name the repository and its commit."""
    return {name: data for name, data in files.items() if name not in NAMES_ITS_SOURCE}
