"""Preflight checks of a push: the user's token and permissions, the repository's name, and what it already holds.

Each may end a push, so they run before anything is converted. Only `make_repository` changes anything on the Hub.

All that ask the Hub try again after an error that may pass (`with_retries`), and raise other exceptions as
huggingface_hub does. Callers convert those with `push_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import SourceError
from ..files.model_files import INDEX_FILE, SINGLE_FILE, is_adapter
from ..files.tensors import MAX_HEADER, TensorInfo, read_header
from .error_mapping import CARD_HINT, WRITE_TOKEN_HINT, PushError, error_reason, status_of
from .source import HubFile, with_retries

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# Dtypes of unquantized matrices; I64 and BOOL are those of positions and masks.
UNQUANTIZED = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
OTHER_REPOSITORY_HINT = (
    "push to another repository, open a pull request with --create-pr, or insist with --replace-weights"
)


def user_name(repo: str) -> str:
    """Return the name of the user who is logged in to the Hub.

    Args:
        repo: the repository to push to, for the error message.

    Raises:
        PushError: the token is read-only.
        Exception: no token was found, the Hub refuses it, or cannot be reached; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi

    user = with_retries(HfApi().whoami)
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PushError(f"{repo} cannot be written to: the token of {user['name']} is read-only", WRITE_TOKEN_HINT)
    return str(user["name"])


def require_namespace(repo: str) -> None:
    """Check that the user is the owner of a repository that is to be created, or a member of the organization.

    What a fine-grained token may do is known only when it is used.

    Args:
        repo: "org/name".

    Raises:
        PushError: the user is neither.
        Exception: the Hub cannot be reached, or refuses; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi

    user, owner = with_retries(HfApi().whoami), repo.partition("/")[0]
    if ((user.get("auth") or {}).get("accessToken") or {}).get("role") == "fineGrained":
        return
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs") or ())]
    if owner.lower() not in map(str.lower, owners):
        raise PushError(
            f"{repo} cannot be created: {user['name']} is no member of {owner}",
            f"push to {user['name']}/{repo.partition('/')[2]}, or log in as somebody who may",
        )


def find_repository(name: str) -> ModelInfo | None:
    """Return the Hub's information on a repository.

    Args:
        name: "org/name"; it may be a former name.

    Returns:
        huggingface_hub's ModelInfo, with the size and digest of each file; None if there is no such repository or the
        user cannot see it.

    Raises:
        HFValidationError: it is no possible name.
        GatedRepoError: the repository is gated, and the user has no access to it.
        Exception: the Hub cannot be reached, or refuses; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return with_retries(lambda: HfApi().model_info(name, files_metadata=True))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None


def make_repository(name: str, private: bool) -> str:
    """Create a repository if there is none. One that exists is not changed.

    Args:
        name: "org/name".
        private: whether it is private; if not, the organization's default applies.

    Returns:
        The name that the Hub gives it: "org/name".

    Raises:
        Exception: the user may not create it, or the Hub cannot be reached; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi

    return with_retries(lambda: HfApi().create_repo(name, private=private or None, exist_ok=True).repo_id)


def require_permission(repo: str, write: bool) -> None:
    """Check that the user may read a repository, or write to it.

    Args:
        repo: the repository, such as "org/name".
        write: whether the user must be allowed to write to it, not only to read it.

    Raises:
        HfHubHTTPError: the user may not.
        Exception: the Hub cannot be reached; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi

    with_retries(lambda: HfApi().auth_check(repo, write=write))


def require_valid_card(repo: str, card: str) -> None:
    """Have the Hub check the metadata of a model card, as it does before it accepts a commit.

    Args:
        repo: the repository to push to, for the error message.
        card: the text of README.md.

    Raises:
        PushError: the Hub refuses the card (status 400); the message names the fields.
        Exception: the Hub gives another error or cannot be reached, also after retries; as huggingface_hub raises it.
    """
    from huggingface_hub import constants, get_session, hf_raise_for_status
    from huggingface_hub.errors import BadRequestError
    from huggingface_hub.utils._headers import build_hf_headers

    body = {"content": card, "repoType": "model"}

    def validate() -> None:
        address = f"{constants.ENDPOINT}/api/validate-yaml"
        hf_raise_for_status(get_session().post(address, json=body, headers=build_hf_headers()))

    try:
        with_retries(validate)
    except BadRequestError as error:
        raise PushError(f"{repo} refuses the model card: {error_reason(error)}", CARD_HINT) from None


def refuse_foreign_weights(repository: ModelInfo, shards: Sequence[str]) -> None:
    """Refuse a repository in which weight files of another model would stay beside the pushed shards.

    Only files outside of directories count. Nothing is asked of the Hub.

    Args:
        repository: the Hub's information on the repository to push to.
        shards: file names of the shards to push.

    Raises:
        PushError: such files exist.
    """
    present = _files(repository)
    weights = (name for name in present if "/" not in name and name.endswith((".safetensors", ".index.json")))
    # With an index engines tell an adapter of the model from its weights.
    beside_index = [name for name in present if is_adapter(name)] if INDEX_FILE in present else []
    foreign = [name for name in weights if name not in {*shards, INDEX_FILE, *beside_index}]
    if shards == [SINGLE_FILE] and INDEX_FILE in present:
        foreign.append(INDEX_FILE)
    if foreign:
        raise PushError(
            f"{repository.id} already holds {foreign[0]}, which would be left beside this model's shards",
            "push to another repository, or delete that file from this one first",
        )


def refuse_source(repository: ModelInfo, names: Iterable[str], downloaded: str | None) -> None:
    """Refuse a repository that is the source of the model.

    Args:
        repository: the Hub's information on the repository to push to.
        names: the model's base models as its card lists them, such as "org/name".
        downloaded: the commit at which the source was downloaded, if its repository is not known; else None.

    Raises:
        PushError: the repository is the source.
        Exception: the Hub cannot be asked; as huggingface_hub raises it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    is_source = any(_present_name(name) == repository.id.lower() for name in names)
    if downloaded is not None and not is_source:
        try:
            with_retries(lambda: HfApi().model_info(repository.id, revision=downloaded))
            is_source = True
        except HfHubHTTPError as error:
            if status_of(error) not in (400, 404):
                raise
    if is_source:
        raise PushError(
            f"{repository.id} is what the model is made from, and would be replaced by it", OTHER_REPOSITORY_HINT
        )


def _present_name(name: str) -> str:
    """The current name of a repository, in lower case; the given name if the user cannot see the repository."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        repository = find_repository(name)
    except HFValidationError:
        repository = None
    except HfHubHTTPError as error:
        # It is gated or disabled, so it is not the repository to push to, which the user can read.
        if status_of(error) not in (401, 403, 404):
            raise
        repository = None
    return (repository.id if repository else name).lower()


def refuse_unquantized(repository: ModelInfo, shards: Iterable[str], is_ours: Callable[[str, str], bool]) -> None:
    """Refuse a repository in which the push would replace an unquantized model.

    Args:
        repository: the Hub's information on the repository to push to.
        shards: file names of the shards to push.
        is_ours: given file name and digest (SHA-256, hexadecimal) of a shard in the repository, returns whether it is
            the shard to push.

    Raises:
        PushError: under these names the repository holds unquantized weights only, and a file that is not to be pushed.
        SourceError: its shards cannot be read.
    """
    present = _files(repository)
    unquantized: list[HubFile] = []
    for file in (present[name] for name in shards if name in present):
        tensors = _tensors(file)
        if any(info.dtype not in UNQUANTIZED for info in tensors if len(info.shape) > 1):
            return
        if tensors:
            unquantized.append(file)
    for file in unquantized:
        if not is_ours(file.name, file.digest):
            raise PushError(
                f"{repository.id} holds unquantized weights ({file.name}), which this model would replace",
                OTHER_REPOSITORY_HINT,
            )


def _tensors(file: HubFile) -> list[TensorInfo]:
    """The tensors in a file's safetensors header; none if the header is not valid, as nobody can load the file then."""
    if file.size < 8:
        return []
    length = int.from_bytes(file.read(0, 8), "little")
    start = file.read(0, min(file.size, 8 + min(length, MAX_HEADER)))
    try:
        return [info for info, _ in read_header(lambda at, count: start[at : at + count], file.size, file.name)[1]]
    except SourceError:
        return []


def _files(repository: ModelInfo) -> dict[str, HubFile]:
    """The files on the main branch, by name."""
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
