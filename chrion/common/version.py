"""The version of Chrion."""

__version__ = "0.1.0"
