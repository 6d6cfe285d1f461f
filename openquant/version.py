"""The version, of the program and of what it writes, and the name under which pip installs it."""

__version__ = "0.1.0"

# As in pyproject.toml. On the package index this name belongs to another project, so only a checkout is installed.
DISTRIBUTION = "openquant"


def install_hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, such as "report"."""
    return f"in the checkout of {DISTRIBUTION}: pip install -e '.[{extra}]'"
