"""A read-only view of a folder, by FUSE, whose operations each take some time more, as on a
network's file system.

As with NFS the kernel keeps names, also of what is not there, and attributes for 30 s. What was
read it keeps as long as the view is mounted. Prints at the end how many operations of each kind
were served.

    python delayed_folder.py FOLDER MOUNT_POINT SECONDS
"""

import errno
import json
import os
import sys
import time
from collections import Counter

from mfusepy import FUSE, FuseOSError, Operations

CACHES = {"attr_timeout": 30, "entry_timeout": 30, "negative_timeout": 30, "kernel_cache": True}
KEYS = (
    "st_mode",
    "st_ino",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_size",
    "st_atime_ns",
    "st_mtime_ns",
    "st_ctime_ns",
)


class DelayedFolder(Operations):
    use_ns = True

    def __init__(self, folder: str, delay: float) -> None:
        self.folder = folder
        self.delay = delay
        self.served: list[str] = []

    def _serve(self, operation: str) -> None:
        self.served.append(operation)
        if self.delay:
            time.sleep(self.delay)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        self._serve("getattr")
        try:
            found = os.lstat(self.folder + path)
        except FileNotFoundError:
            raise FuseOSError(errno.ENOENT) from None
        return {key.removesuffix("_ns"): getattr(found, key) for key in KEYS}

    def readlink(self, path: str) -> str:
        self._serve("readlink")
        return os.readlink(self.folder + path)

    def readdir(self, path: str, fh: int) -> list[str]:
        self._serve("readdir")
        return [".", "..", *os.listdir(self.folder + path)]

    def open(self, path: str, flags: int) -> int:
        self._serve("open")
        return os.open(self.folder + path, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._serve("read")
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    view = DelayedFolder(sys.argv[1], float(sys.argv[3]))
    FUSE(view, sys.argv[2], foreground=True, ro=True, **CACHES)
    print(json.dumps(Counter(view.served)))
