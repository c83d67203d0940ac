"""The version of this package: the one place that names it; pyproject.toml reads it from here."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
