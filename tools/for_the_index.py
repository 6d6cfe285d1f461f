"""Puts the address of the repository into README.md and pyproject.toml, for a release.

    python tools/for_the_index.py https://github.com/OWNER/NAME v1.2.3

The package index shows README.md, but no file that it links to: links become those of the repository at the tag. The
metadata gets [project.urls]. .github/workflows/release.yml runs this before it builds.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

URLS = """[project.urls]
Source = "{repository}"
Documentation = "{repository}/blob/{tag}/docs/README.md"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"
Issues = "{repository}/issues"

"""


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a Markdown text whose relative links and pictures are those of the repository at a tag.

    Args:
        text: a document in the root of the repository. Where it clones the repository, it says URL.
        repository: address, such as "https://github.com/OWNER/NAME".
        tag: name of the tag.
    """
    text = text.replace("git clone URL ", f"git clone {repository} ")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/{tag}/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/{tag}/", text)


def main() -> None:
    """Read the command line and change both files."""
    parser = argparse.ArgumentParser(description="Put the repository's address into README.md and pyproject.toml.")
    parser.add_argument("repository", help="address, such as https://github.com/OWNER/NAME")
    parser.add_argument("tag", help="tag of the release, such as v1.2.3")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="directory of both files")
    given = parser.parse_args()
    readme, project = given.root / "README.md", given.root / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), given.repository, given.tag))
    head, extras, rest = project.read_text().partition("[project.optional-dependencies]")
    project.write_text(head + URLS.format(repository=given.repository, tag=given.tag) + extras + rest)


if __name__ == "__main__":
    main()
