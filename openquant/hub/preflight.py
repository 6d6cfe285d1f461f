"""What is asked of the Hub before a model is made for it: who the user is, what the repository is called and holds.

All of it may end a push, so it is asked before anything is converted. Nothing here changes anything, but for
`make_repository`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import SourceError
from ..files.names import INDEX_FILE, SINGLE_FILE
from ..files.tensors import MAX_HEADER, TensorInfo, read_header
from .error_mapping import MEND_THE_CARD, USE_A_TOKEN, PushError, error_reason, status_of
from .source import HubFile, patiently

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# Of matrices that no quantization has touched; masks and positions come as the last two.
UNQUANTIZED = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
ANOTHER_PLACE = "push to another repository, open a pull request with --create-pr, or insist with --replace-weights"


def user_name(repo: str) -> str:
    """Who is logged in.

    Raises:
        PushError: a token that may not write to any repository.
    """
    from huggingface_hub import HfApi

    user = patiently(HfApi().whoami)
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PushError(f"{repo} cannot be written to: the token of {user['name']} is read-only", USE_A_TOKEN)
    return str(user["name"])


def find_repository(name: str) -> ModelInfo | None:
    """What the Hub knows of a repository, by whatever name it was ever known; None if this user sees none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return patiently(lambda: HfApi().model_info(name, files_metadata=True))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None


def make_repository(name: str, private: bool) -> str:
    """Make a repository; the name that the Hub gives it."""
    from huggingface_hub import HfApi

    return patiently(lambda: HfApi().create_repo(name, private=private or None, exist_ok=True).repo_id)


def require_permission(repo: str, write: bool) -> None:
    """Let the client's error out if the user may not read the repository, or write to it."""
    from huggingface_hub import HfApi

    patiently(lambda: HfApi().auth_check(repo, write=write))


def require_valid(repo: str, card: str) -> None:
    """Have a card's metadata checked, as the Hub does before it takes a commit.

    Raises:
        PushError: it names what is wrong.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status
    from huggingface_hub.errors import BadRequestError
    from huggingface_hub.utils._headers import build_hf_headers

    body = {"content": card, "repoType": "model"}

    def ask() -> None:
        address = f"{constants.ENDPOINT}/api/validate-yaml"
        hf_raise_for_status(get_session().post(address, json=body, headers=build_hf_headers()))

    try:
        patiently(ask)
    except BadRequestError as error:
        raise PushError(f"{repo} refuses the model card: {error_reason(error)}", MEND_THE_CARD) from None


def refuse_mixture(repository: ModelInfo, shards: Sequence[str]) -> None:
    """No weights of another model may be left beside these shards.

    Raises:
        PushError: some would be.
    """
    present = _files(repository)
    weights = (name for name in present if "/" not in name and name.endswith((".safetensors", ".index.json")))
    foreign = [name for name in weights if name not in {*shards, INDEX_FILE}]
    if shards == [SINGLE_FILE] and INDEX_FILE in present:
        foreign.append(INDEX_FILE)
    if foreign:
        raise PushError(
            f"{repository.id} already holds {foreign[0]}, which this model would not replace",
            "push to another repository, or delete that file from this one first",
        )


def refuse_source(repository: ModelInfo, names: Iterable[str], downloaded: str | None) -> None:
    """A repository may not be replaced by what is made from it.

    Args:
        repository: where the model is to go.
        names: the repositories that it is made from, as its card has them.
        downloaded: the commit that its source was downloaded as, if that is known and the repository is not.

    Raises:
        PushError: it would be.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    is_source = any(_present_name(name) == repository.id.lower() for name in names)
    if downloaded is not None and not is_source:
        try:
            patiently(lambda: HfApi().model_info(repository.id, revision=downloaded))
            is_source = True
        except HfHubHTTPError as error:
            if status_of(error) not in (400, 404):
                raise
    if is_source:
        raise PushError(f"{repository.id} is what the model is made from, and would be replaced by it", ANOTHER_PLACE)


def _present_name(name: str) -> str:
    """What a repository is called now, in small letters; the name itself if the user sees none of that name."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = find_repository(name)
    except HFValidationError:
        found = None
    except HfHubHTTPError as error:
        # Gated or disabled: not the one that the user writes to, which was found.
        if status_of(error) not in (401, 403, 404):
            raise
        found = None
    return (found.id if found else name).lower()


def refuse_unquantized(repository: ModelInfo, shards: Iterable[str], is_ours: Callable[[str, str], bool]) -> None:
    """A model that is not quantized may not be replaced, wherever this one comes from.

    Args:
        repository: where the model is to go.
        shards: names of its shards.
        is_ours: whether a shard of that name and digest is the one that would be pushed.

    Raises:
        PushError: it would be.
        SourceError: what is there cannot be read.
    """
    present = _files(repository)
    plain: list[HubFile] = []
    for file in (present[name] for name in shards if name in present):
        tensors = _tensors(file)
        if any(info.dtype not in UNQUANTIZED for info in tensors if len(info.shape) > 1):
            return
        if tensors:
            plain.append(file)
    for file in plain:
        if not is_ours(file.name, file.digest):
            raise PushError(
                f"{repository.id} holds unquantized weights ({file.name}), which this model would replace",
                ANOTHER_PLACE,
            )


def _tensors(file: HubFile) -> list[TensorInfo]:
    """What a safetensors file says it holds; nothing if it is none, since nobody can load it then."""
    if file.size < 8:
        return []
    length = int.from_bytes(file.read(0, 8), "little")
    start = file.read(0, min(file.size, 8 + min(length, MAX_HEADER)))
    try:
        return [info for info, _ in read_header(lambda at, count: start[at : at + count], file.size, file.name)[1]]
    except SourceError:
        return []


def _files(repository: ModelInfo) -> dict[str, HubFile]:
    """The files on main."""
    return {
        file.rfilename: HubFile(
            repository.id,
            repository.sha or "main",
            file.rfilename,
            file.size or 0,
            file.lfs.sha256 if file.lfs else file.blob_id or "",
        )
        for file in repository.siblings or ()
    }
