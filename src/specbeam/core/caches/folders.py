"""The folders of cache files, below one root, and whether they can be trusted.

Cache files contain code, so folders that another user owns or can write to are not read.
"""

import atexit
import os
import shutil
import stat
from pathlib import Path
from tempfile import mkdtemp

from platformdirs import user_cache_path

from specbeam.core.errors import warn

VARIABLE = "SPECBEAM_CACHE"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER = 0
_WARNED: set[str] = set()  # kinds of warnings that this process has given


class _UnusableFolderError(Exception):
    """A folder cannot be trusted or created, for the reason in the message."""


def cache_folder(name: str, stated: str = "", variable: str = "") -> Path | None:
    """Return a folder below the root of all cache files, created if it is missing.

    The root is `SPECBEAM_CACHE`, or specbeam's folder in the user's cache directory. Without a usable folder, returns
    None and warns once.

    Args:
        name: name of the folder.
        stated: a different root, or "".
        variable: the environment variable that states this root, for messages.
    """
    try:
        root = _root(stated, variable)
        folder = root / name
        for path in (root, folder):
            _prepare(path)
    except _UnusableFolderError as reason:
        warn_once(
            "folder",
            f"{reason}, so machine code and measurements are not saved, and each process compiles and measures again. "
            f"Set {VARIABLE} to the absolute path of a folder that this user owns and no other user can write to",
        )
        return None
    return folder


def lend_folder(variable: str, name: str) -> None:
    """Point another library's cache folder below specbeam's root, by its environment variable, unless that is set.

    Without a usable root, the folder is temporary and deleted when this process ends.
    """
    if os.environ.get(variable):
        return
    folder = cache_folder(name)
    if folder is None:
        folder = Path(mkdtemp(prefix="specbeam-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[variable] = str(folder)


def warn_once(kind: str, text: str) -> None:
    """Warn, at most once per kind of warning in this process."""
    if kind not in _WARNED:
        _WARNED.add(kind)
        warn(text)


def distrust(status: os.stat_result) -> str:
    """Return the reason not to trust a file or folder with this status; "" if it can be trusted."""
    if not hasattr(os, "geteuid"):  # Windows has no numeric file owners
        return ""
    user = os.geteuid()
    if status.st_uid != user:
        return f"belongs to user {status.st_uid}, and this process runs as user {user}"
    if status.st_mode & _OTHERS_WRITE:
        return f"can be written by other users (its mode is {stat.S_IMODE(status.st_mode):o})"
    return ""


def _root(stated: str, variable: str) -> Path:
    """Return the root of all cache files. Raises `_UnusableFolderError` for a relative path or a missing home folder."""
    for place, source in ((stated, variable), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if not place:
            continue
        path = Path(os.path.expanduser(place))
        if not path.is_absolute():  # it may be a folder of another user
            raise _UnusableFolderError(f"{source} is the relative path {place!r}")
        return path
    try:
        path = user_cache_path("specbeam", appauthor=False)
    except (RuntimeError, OSError, KeyError) as error:
        raise _UnusableFolderError(f"this user has no home folder ({error})") from error
    if not path.is_absolute():
        raise _UnusableFolderError("this user has no home folder")
    return path


def _prepare(path: Path) -> None:
    """Create a folder that only this user can read and write, if it is missing.

    Raises `_UnusableFolderError` if this is impossible or the folder cannot be trusted. It may be a symbolic link owned by
    the user or by root.
    """
    try:
        try:
            status = path.stat()
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.stat()
        link = path.lstat()
    except OSError as error:
        raise _UnusableFolderError(
            f"the folder {path} cannot be created or read ({error.strerror or error})"
        ) from error
    reason = distrust(status) if stat.S_ISDIR(status.st_mode) else "is not a folder"
    if not reason and link.st_uid not in (status.st_uid, _ROOT_USER):
        reason = f"is a link of user {link.st_uid}"
    if reason:
        raise _UnusableFolderError(f"{path} {reason}")
