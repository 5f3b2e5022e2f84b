"""Permissions in a cache directory: what is written there gets the directory's own group and mode.

So whoever may read the directory may read its records, and whoever may add files to it may add records, whatever the
umask of the user who came first. In a folder with the sticky bit, where users keep their hands off each other's files,
only the owner may write to a file; nobody needs to, since records are replaced and never changed.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import stat

__all__ = ["ANY", "share_file", "share_folder"]

#: The permissions of files where the user has set no limit.
ANY = 0o666

_OWN = 0o600


def share_file(file: int, above: os.stat_result, at_most: int = ANY) -> None:
    """Gives a file of this user's the group and mode of a folder, as far as permitted.

    Args:
        file: its descriptor. A file that is not this user's own, or has a second name, stays as it is.
        above: of the folder.
        at_most: permissions that the file may have at most.
    """
    mode = above.st_mode & at_most & (~0o022 if above.st_mode & stat.S_ISVTX else ANY) | _OWN
    st = os.fstat(file)
    if stat.S_ISREG(st.st_mode) and st.st_nlink <= 1:
        _share(file, st, above, mode & ANY)


def share_folder(folder: int, above: os.stat_result) -> None:
    """Gives a folder of this user's the group and mode of the one above, as far as permitted."""
    _share(folder, os.fstat(folder), above, stat.S_IMODE(above.st_mode))


def _share(target: int, st: os.stat_result, above: os.stat_result, mode: int) -> None:
    if st.st_uid != os.geteuid():
        return
    if st.st_gid != above.st_gid:
        with contextlib.suppress(OSError):  # not a member of that group
            os.fchown(target, -1, above.st_gid)
            st = os.fstat(target)  # fchown may have cleared bits
    if stat.S_IMODE(st.st_mode) != mode:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(target, mode)
