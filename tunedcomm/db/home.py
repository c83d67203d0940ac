"""Where the user's own files lie, and what is said where the user has no place for them."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from tunedcomm.errors import DatabaseAccessError

__all__ = ["data_directory", "expanded"]


def data_directory() -> Path:
    """The user's data directory for tunedcomm; it need not exist.

    Raises:
        DatabaseAccessError: there is none.
    """
    try:
        folder = Path(platformdirs.user_data_dir("tunedcomm", appauthor=False))
    except RuntimeError:  # older versions leave the `~` as it stands
        folder = Path("~")
    if folder.parts[0] == "~":
        raise DatabaseAccessError(
            f"user {os.getuid()} has no home directory (HOME is not set, and the system knows no such user): there is "
            "no user database, and untuned problems are not noted. Set HOME, or TUNEDCOMM_DB to a file that may be "
            "written"
        )
    return folder


def expanded(text: str) -> Path:
    """The path, with a leading `~` replaced by the home directory that it stands for.

    Raises:
        DatabaseAccessError: there is no such directory.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DatabaseAccessError(
            f"database path {text!r} begins with a home directory that is not known (HOME is not set, or there is no "
            "such user); write the path in full"
        ) from None
