"""The Hub that tests talk to is itself held to what the real client expects."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, close_session, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from conftest import tree
from support.loopback_hub import COMMIT, Fault, LoopbackHub

WEIGHTS = bytes(range(256)) * 2048
NAME = "model.safetensors"

# huggingface_hub 2.4 uploads LFS files with the old spelling (lfs.py:367).
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client reads HF_HUB_DISABLE_XET when it is imported, which others may have done before."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield
    close_session()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def api(hub: LoopbackHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "original").mkdir(parents=True)
    (root / NAME).write_bytes(WEIGHTS)
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    (root / "original" / "params.json").write_text("{}")
    return root


@pytest.fixture
def source(hub: LoopbackHub, folder: Path) -> str:
    """A repository to download from."""
    hub.repositories["org/source"] = folder
    return "org/source"


def test_a_folder_comes_back_with_equal_bytes(hub: LoopbackHub, api: HfApi, folder: Path, tmp_path: Path) -> None:
    address = api.create_repo("org/name", private=True)
    assert address == f"{hub.endpoint}/org/name" == api.create_repo("org/name", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="You already created this model repo"):
        api.create_repo("org/name")
    assert api.repo_info("org/name").private
    api.upload_folder(repo_id="org/name", folder_path=folder, commit_message="All of it")
    copy = Path(api.snapshot_download("org/name", cache_dir=tmp_path / "cache"))
    assert tree(copy) == tree(folder) | {".gitattributes": (copy / ".gitattributes").read_bytes()}
    assert tree(copy) == {path: content.read_bytes() for path, content in hub.files("org/name").items()}
    assert hub.commits("org/name") == [("initial commit", [".gitattributes"]), ("All of it", sorted(tree(folder)))]
    assert hub.uploads == {sha256(WEIGHTS).hexdigest(): 1}
    # What the server says of the files is what the client computes from them.
    assert not api.verify_repo_checksums("org/name", cache_dir=tmp_path / "cache").mismatches
    # The second time there is nothing to commit.
    api.upload_folder(repo_id="org/name", folder_path=folder)
    assert len(hub.commits("org/name")) == 2
    assert set(hub.uploads.values()) == {1}


def test_what_is_known_of_files(hub: LoopbackHub, api: HfApi, source: str) -> None:
    listed = {entry.path: entry for entry in api.list_repo_tree(source)}
    assert set(listed) == {"README.md", NAME, "original"}
    assert [entry.path for entry in api.list_repo_tree(source, "original")] == ["original/params.json"]
    assert set(api.list_repo_files(source)) == {"README.md", NAME, "original/params.json"}
    found = api.get_paths_info(source, [NAME, "original", "missing"])
    assert [entry.path for entry in found] == [NAME, "original"]
    assert found[0] == listed[NAME]
    assert found[0].lfs.sha256 == sha256(WEIGHTS).hexdigest()
    head = get_hf_file_metadata(hf_hub_url(source, NAME, endpoint=hub.endpoint), token=False)
    assert (head.etag, head.size, head.commit_hash) == (found[0].lfs.sha256, len(WEIGHTS), COMMIT)
    assert api.file_exists(source, NAME)
    assert not api.file_exists(source, "missing")
    siblings = api.model_info(source, files_metadata=True).siblings or []
    assert {sibling.rfilename: sibling.size for sibling in siblings}[NAME] == len(WEIGHTS)


def test_faults(hub: LoopbackHub, api: HfApi, source: str, tmp_path: Path) -> None:
    """Each is met in turn by one download of its own; what the client does not notice gets through."""
    order: list[str] = []

    def download() -> bytes:
        order.append("asked")
        path = api.hf_hub_download(source, NAME, local_dir=tmp_path / "copy", force_download=True)
        return Path(path).read_bytes()

    hub.faults.append(Fault(NAME, "GET", flip=300_000))
    flipped = download()
    assert [i for i, byte in enumerate(WEIGHTS) if flipped[i] != byte] == [300_000]
    hub.faults.append(Fault(NAME, "GET", short=1000))
    with pytest.raises(OSError, match=f"file should be of size {len(WEIGHTS)} but has size 1000"):
        download()
    hub.faults.append(Fault(NAME, "GET", status=429, headers={"Retry-After": "0"}))
    assert download() == WEIGHTS
    hub.faults.append(Fault(NAME, "GET", status=503))
    with pytest.raises(HfHubHTTPError, match="503 Service Unavailable"):
        download()
    hub.faults.append(Fault(NAME, "GET", cut=100_000, reset=True))
    with pytest.raises(Exception, match="Connection reset by peer"):
        download()
    hub.faults.append(Fault(NAME, "HEAD", status=403, code="GatedRepo"))
    with pytest.raises(ValueError, match="Force download failed") as refused:
        download()
    assert isinstance(refused.value.__cause__, GatedRepoError)
    hub.faults.append(Fault(NAME, "GET", call=lambda: order.append("called"), delay=0.01))
    assert download() == WEIGHTS
    assert order[-2:] == ["asked", "called"]
    hub.faults.append(Fault(NAME, after=2, times=None, content=b"other"))
    assert download() == WEIGHTS
    assert download() == b"other"


def test_uploads_that_go_wrong(hub: LoopbackHub, api: HfApi, folder: Path) -> None:
    api.create_repo("org/name")

    def weights() -> CommitOperationAdd:
        return CommitOperationAdd(NAME, folder / NAME)

    wrong = weights()
    wrong.upload_info.sha256 = bytes(32)
    with pytest.raises(RuntimeError, match="Error while uploading") as refused:
        api.preupload_lfs_files("org/name", [wrong])
    assert f"{'00' * 32} was announced, {sha256(WEIGHTS).hexdigest()}" in str(refused.value.__cause__)
    # Half an upload leaves nothing behind, and the client sends it again.
    before = set(hub.blobs.iterdir())
    left: list[set[Path]] = []
    hub.faults.append(Fault("^/lfs/", "PUT", cut_upload=100_000))
    hub.faults.append(Fault("^/lfs/", "PUT", call=lambda: left.append(set(hub.blobs.iterdir()))))
    api.preupload_lfs_files("org/name", [weights()])
    assert left == [before]
    assert hub.uploads == {sha256(WEIGHTS).hexdigest(): 1}
    # A commit whose answer is lost was made all the same.
    hub.faults.append(Fault("/commit/", "POST", cut=0))
    with pytest.raises(Exception, match="peer closed connection"):
        api.create_commit("org/name", [weights()], commit_message="Lost")
    assert hub.commits("org/name")[-1] == ("Lost", [NAME])


def test_tokens(hub: LoopbackHub) -> None:
    hub.token = "hf_right"
    right, wrong, none = (HfApi(endpoint=hub.endpoint, token=token) for token in ("hf_right", "hf_wrong", False))
    right.create_repo("name", private=True)
    assert right.whoami()["name"] == "user"
    assert right.file_exists("user/name", ".gitattributes")
    with pytest.raises(RepositoryNotFoundError, match="Invalid username or password"):
        none.repo_info("user/name")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header"):
        wrong.repo_info("user/name")
    with pytest.raises(HfHubHTTPError, match="401 Unauthorized"):
        none.create_repo("other")
    with pytest.raises(RepositoryNotFoundError):
        right.repo_info("user/other")
    with pytest.raises(RevisionNotFoundError):
        right.repo_info("user/name", revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        list(right.list_repo_tree("user/name", "missing"))
    assert "hf_right" not in hub.record.read_text()
