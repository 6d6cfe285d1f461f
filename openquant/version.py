"""The version of the program and of what it writes, the name under which pip installs it, and the versions it cites."""

__version__ = "0.1.0"

# As in pyproject.toml. On the package index the name `openquant` belongs to another project.
DISTRIBUTION = "openquant-llm"

# Of which version a comment, a document or a message speaks that names none: "vLLM models/llama.py:354" is a line of
# this one. The serving tests install these (tests/serve/install_*.sh), and tests/serve/test_cited.py compares the two.
# CONTRIBUTING.md says what else a new release takes.
CITED = {
    "vLLM": "0.32.0",
    "SGLang": "0.5.23",
    "transformers": "5.24",
    "compressed-tensors": "0.20",
}
VLLM = f"vLLM {CITED['vLLM']}"
SGLANG = f"SGLang {CITED['SGLang']}"


def install_hint(extra: str) -> str:
    """Return the hint that has the command which installs an extra of pyproject.toml.

    Args:
        extra: name of the extra, such as "report".
    """
    return f"in the checkout of openquant: pip install -e '.[{extra}]'"
