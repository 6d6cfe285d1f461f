"""Preflight checks of a push: the user's token and permissions, the repository's name, and what it already holds.

Each may end a push, so they run before anything is converted. None changes anything on the Hub.

All that ask the Hub try again after an error that may pass (`with_retries`). Besides the errors that are named, they
raise those of huggingface_hub, which callers convert with `push_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..files.model_files import INDEX_FILE, SINGLE_FILE, is_adapter
from .error_mapping import CARD_HINT, WRITE_TOKEN_HINT, PushError, error_reason, status_of
from .source import with_retries

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

# Dtypes of unquantized matrices; I64 and BOOL are those of positions and masks.
UNQUANTIZED = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}
OTHER_REPOSITORY_HINT = (
    "push to another repository, open a pull request with --create-pr, or insist with --replace-weights"
)


def user_name(repo: str) -> str:
    """Return the name of the user who is logged in to the Hub.

    Raises:
        PushError: the token is read-only; the message names the repository to push to.
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

    Raises:
        PushError: the user is neither.
    """
    from huggingface_hub import HfApi

    user = with_retries(HfApi().whoami)
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "fineGrained":
        return

    owner, _, name = repo.partition("/")
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs") or ())]
    if owner.lower() not in map(str.lower, owners):
        raise PushError(
            f"{repo} cannot be created: {user['name']} is no member of {owner}",
            f"push to {user['name']}/{name}, or log in as somebody who may",
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
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return with_retries(lambda: HfApi().model_info(name, files_metadata=True))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None


def require_permission(repo: str, write: bool) -> None:
    """Check that the user may read a repository, or also write to it.

    Raises:
        HfHubHTTPError: the user may not.
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
    present = [file.rfilename for file in repository.siblings or ()]
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


def protect_source(repository: ModelInfo, names: Iterable[str], downloaded: str | None) -> None:
    """Refuse a push that would replace the source of the model.

    Args:
        repository: the Hub's information on the repository to push to.
        names: the model's base models as its card lists them, such as "org/name".
        downloaded: the commit at which the source was downloaded, if its repository is not known; else None.

    Raises:
        PushError: the repository is the source.
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


def protect_unquantized(repository: ModelInfo, shards: Iterable[str], is_ours: Callable[[str, str], bool]) -> None:
    """Refuse a push that would replace an unquantized model.

    Args:
        repository: the Hub's information on the repository to push to.
        shards: file names of the shards to push.
        is_ours: given file name and digest (SHA-256, hexadecimal) of a shard in the repository, returns whether it is
            the shard to push.

    Raises:
        PushError: the repository's shards of these names hold unquantized weights only, and not those to push.
    """
    present = {file.rfilename: file for file in repository.siblings or ()}
    unquantized: list[RepoSibling] = []
    for file in (present[name] for name in shards if name in present):
        dtypes = _matrix_dtypes(repository, file)
        if dtypes - UNQUANTIZED:
            return
        if dtypes:
            unquantized.append(file)

    for file in unquantized:
        if not is_ours(file.rfilename, file.lfs.sha256 if file.lfs else ""):
            raise PushError(
                f"{repository.id} holds unquantized weights ({file.rfilename}), which this model would replace",
                OTHER_REPOSITORY_HINT,
            )


def _matrix_dtypes(repository: ModelInfo, file: RepoSibling) -> set[str]:
    """The dtypes of a shard's matrices; none if nobody can load the file."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    def read() -> set[str]:
        metadata = HfApi().parse_safetensors_file_metadata(repository.id, file.rfilename, revision=repository.sha)
        return {tensor.dtype for tensor in metadata.tensors.values() if len(tensor.shape) > 1}

    try:
        return with_retries(read) if file.size else set()
    except SafetensorsParsingError:
        return set()
