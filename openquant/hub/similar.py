"""Repositories with a name like one that does not exist, for the hint of its error."""

from __future__ import annotations

import difflib
import re
from typing import Any

# At most so many names, and seconds for each of two requests.
MOST, PATIENCE = 3, 3.0
# Repositories that a request lists at most; those of one owner that begin alike may be many.
_LISTED = 200
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def similar_repositories(repo: str) -> list[str]:
    """Ask the Hub for repositories whose names are near, first those of the same owner.

    Args:
        repo: "org/name" or "name".

    Returns:
        At most three names, the nearest first; none if there are none, or if the Hub does not answer soon.
    """
    owner, _, name = repo.rpartition("/")
    begin = re.split(r"[-_.]", name)[0]
    found = _list_models(author=owner, search=begin) if owner else []
    near = _nearest(repo, found)
    return near or _nearest(name, _list_models(search=name), by_name=True)


def _nearest(wanted: str, names: list[str], by_name: bool = False) -> list[str]:
    known = {(name.rpartition("/")[2] if by_name else name).lower(): name for name in reversed(names)}
    return [known[key] for key in difflib.get_close_matches(wanted.lower(), known, MOST)]


def _list_models(**query: str) -> list[str]:
    """The names of models that the Hub lists, the most downloaded first; none after any error."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils._headers import build_hf_headers

    settings: dict[str, Any] = {**query, "sort": "downloads", "direction": "-1", "limit": str(_LISTED)}
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=settings, headers=build_hf_headers(), timeout=PATIENCE
        )
        names = [str(entry["id"]) for entry in answer.json()] if answer.status_code == 200 else []
    # The error that is being reported is another one.
    except Exception:
        return []
    return [name for name in names[:_LISTED] if _REPOSITORY.fullmatch(name)]
