"""The version of the program and of what it writes, the name under which pip installs it, and the versions it cites."""

import re

# The version where nothing was built, such as a directory on PYTHONPATH. pyproject.toml has it too, for builds that see
# no tag of git, and it is the newest release in CHANGELOG.md.
NEWEST = "0.1.0"
try:
    from ._version import BUILT as BUILT
except ImportError:
    BUILT = NEWEST


def public_release(version: str) -> str:
    """Return the release that a version begins with: "1.2.3" of "1.2.3.post1.dev4+g1a2b3c4", and "2.0rc1" of "2.0rc1".

    Args:
        version: a version as setuptools-scm makes it from a tag and the number of commits since.
    """
    found = re.match(r"\d+(\.\d+)*((a|b|rc)\d+)?", version)
    return found[0] if found else NEWEST


# What outputs name, and what a digest has: the same for every commit after a release, since a run continues what
# another commit began.
__version__ = public_release(BUILT)

# As in pyproject.toml. On the package index the name `openquant` belongs to another project.
DISTRIBUTION = "openquant-llm"

# Of which version a comment, a document or a message speaks that names none: "vLLM models/llama.py:354" is a line of
# this one. The serving tests install these (tests/serve/install_*.sh), and tests/serve/test_cited_lines.py
# compares the two.
# CONTRIBUTING.md says what else a new release takes.
CITED = {"vLLM": "0.32.0", "SGLang": "0.5.23", "transformers": "5.24", "compressed-tensors": "0.20"}
VLLM = f"vLLM {CITED['vLLM']}"
SGLANG = f"SGLang {CITED['SGLang']}"


def install_hint(extra: str) -> str:
    """Return the hint that has the command which installs an extra of pyproject.toml.

    pip finds the installed openquant, a checkout's too, and adds what the extra names.

    Args:
        extra: name of the extra, such as "report".
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
