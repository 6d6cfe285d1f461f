"""The version, of the program and of what it writes."""

__version__ = "0.1.0"
