"""Files of a study's own: what a study writes does not reach those of the program.

``OVERLAY``: in a mount namespace of its own, each folder lies under an overlay that is written to in
memory. It goes with the last process of the study. What cannot lie under one is read-only.
``FILTER``: where the kernel allows no such namespace, the system calls by which a process changes
files wait for the keeper, which ends the study at the first that names a file outside of its own
temporary folder. Caches in memory go on: a key has one value, whichever process makes it, and a file that any
process uses is not removed. Neither depends on what code it is that writes.

Descriptors that can write have been closed by the keeper (``watch.own_descriptors``). Memory that
is mapped from files, or shared with the program, is replaced by copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import sys
import tempfile
from multiprocessing import process
from typing import Any

from .. import _core
from ..cache import cache
from .watch import fork

OVERLAY, FILTER, NEITHER = "overlay", "filter", "neither"

#: file systems that hold no files of programs, or none but devices
_NO_FILES = {
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs",
    "fusectl", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "sysfs", "tracefs",
}  # fmt: skip
#: where the memory of overlays is mounted: nothing else that a study needs is there
_CARRIER = "/proc/tty"
#: overlays that are mounted at most
_MOST = 400
#: bytes of mapped memory that are copied; more is written to copies of pages, or not at all
_COPIED = 1 << 26

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_FDCWD, MOUNT_ATTR_RDONLY = 442, -100, 1
#: requests of a filter's listener, with the sizes of their structs (linux/seccomp.h)
NOTIF_RECV, NOTIF_SEND, NOTIF_FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_FIXED = 1, 2, 1, 2, 16

#: of system calls: which arguments name the folder and the path of a file, and those of a second
#: file; -1: none. A folder without a path is itself the file, and a path without a folder counts
#: from the current one
_FILE, _PATH, _AT = (0, -1, -1, -1), (-1, 0, -1, -1), (0, 1, -1, -1)
_PATHS, _TO, _ATS, _TO_AT = (-1, 0, -1, 1), (-1, 1, -1, -1), (0, 1, 2, 3), (1, 2, -1, -1)
#: those that name a file to change it: their numbers on x86_64 and aarch64, -1: there is none
_CHANGES = {
    "openat": (257, 56, _AT), "open": (2, -1, _PATH), "creat": (85, -1, _PATH), "mkdir": (83, -1, _PATH),
    "rmdir": (84, -1, _PATH), "unlink": (87, -1, _PATH), "rename": (82, -1, _PATHS),
    "link": (86, -1, _PATHS), "symlink": (88, -1, _TO), "mknod": (133, -1, _PATH),
    "chmod": (90, -1, _PATH), "chown": (92, -1, _PATH), "lchown": (94, -1, _PATH),
    "utime": (132, -1, _PATH), "utimes": (235, -1, _PATH), "futimesat": (261, -1, _AT),
    "renameat": (264, 38, _ATS), "renameat2": (316, 276, _ATS), "mkdirat": (258, 34, _AT),
    "unlinkat": (263, 35, _AT), "linkat": (265, 37, _ATS), "symlinkat": (266, 36, _TO_AT),
    "mknodat": (259, 33, _AT), "truncate": (76, 45, _PATH), "fchmodat": (268, 53, _AT),
    "fchmodat2": (452, 452, _AT), "fchownat": (260, 54, _AT), "utimensat": (280, 88, _AT),
    "setxattr": (188, 5, _PATH), "lsetxattr": (189, 6, _PATH), "removexattr": (197, 14, _PATH),
    "lremovexattr": (198, 15, _PATH), "setxattrat": (463, 463, _AT), "removexattrat": (466, 466, _AT),
    "file_setattr": (469, 469, _AT), "fchmod": (91, 52, _FILE), "fchown": (93, 55, _FILE),
    "fsetxattr": (190, 7, _FILE), "fremovexattr": (199, 16, _FILE),
    "bind": (49, 200, _TO),  # a socket may have a file
}  # fmt: skip
#: those that name files where a filter cannot see them; the C library does without
_HIDDEN = {"open_by_handle_at": (304, 265), "io_uring_setup": (425, 425), "openat2": (437, 437)}
_SECCOMP, _AUDIT_ARCH, _X32 = (317, 277), (0xC000003E, 0xC00000B7), 0x40000000  # another ABI's numbers
#: the place of this machine's numbers; 2: a machine on which there is no filter
_MACHINE = {"x86_64": 0, "aarch64": 1}.get(os.uname().machine, 2)
#: instructions of a filter (linux/filter.h), and its answers (linux/seccomp.h)
LOAD, IS, AT_LEAST, HAS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, WAIT, REFUSE = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.ENOSYS
PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, NEW_LISTENER, SPEC_ALLOW = 38, 1, 8, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *given: object) -> int:
    result: int = getattr(_libc, name)(*given)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def find_way() -> str:
    """Which of the ways there is, tried in a process that ends with the trial."""
    for way in (OVERLAY, FILTER):
        pid = fork(cover_files if way == OVERLAY else lambda: os.close(filter_writes()))
        if os.waitpid(pid, 0)[1] == 0:
            return way
    return NEITHER


def protect(way: str, folder: str, to: socket.socket) -> None:
    """In a process that measures, before anything else. folder: for its temporary files, where it
    does not write to overlays. to: what gives its keeper the filter's listener."""
    vars(process.current_process())["_config"].pop("tempdir", None)  # multiprocessing's, of the program
    sys.dont_write_bytecode = True
    if way == OVERLAY:
        cover_files()
    else:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
    own_mappings()
    if way == FILTER:
        listener = filter_writes()
        socket.send_fds(to, [b"."], [listener])
        os.close(listener)
    to.close()


# ---- a namespace ---------------------------------------------------------------------------


def cover_files() -> None:
    """From now on this process, and those that it forks, write to overlays.

    Raises:
        OSError: the kernel does not allow that.
    """
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        here = "/"
    options = ""
    try:
        _call("unshare", CLONE_NEWNS)
        _mount(None, "/", None, None, MS_REC | MS_PRIVATE)
    except OSError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        _mount(None, "/", None, None, MS_REC | MS_PRIVATE)
        options = ",userxattr"
    mounts: dict[str, tuple[str, bool]] = {}  # of the latest mount of a path: its kind, and whether it can be written to
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            first, last = (part.split() for part in line.split(b" - "))
            path = os.fsdecode(first[4].decode("unicode_escape").encode("latin-1"))
            mounts[path] = last[0].decode(), b"ro" not in first[5].split(b",") + last[2].split(b",")
    size = _core.machine()["memory_available"] // 4
    _mount("minato", _CARRIER, "tmpfs", f"size={size},mode=700")
    carrier = os.open(_CARRIER, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    held = [path for path, (kind, _writable) in mounts.items() if kind not in _NO_FILES]
    for path in held:
        try:
            attributes = struct.pack("4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
            _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), 0, attributes, len(attributes))
        except OSError:
            if os.path.ismount(path):  # else another mount hides it
                raise
    for path in held:
        if mounts[path][1] and path != "/dev" and os.path.isdir(path):
            _cover(path, set(mounts), carrier, options)
    os.close(carrier)
    os.chdir(here)


def _mount(source: str | None, path: str, kind: str | None, options: str | None, flags: int = 0) -> None:
    texts = [text and os.fsencode(text) for text in (source, path, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _cover(path: str, points: set[str], carrier: int, options: str) -> None:
    """Mounts an overlay over a folder; over those below it where another mount lies further down."""
    inside = path.rstrip("/") + "/"
    if any(point.startswith(inside) for point in points):
        with contextlib.suppress(PermissionError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.path not in points:
                    _cover(entry.path, points, carrier, options)
        return
    number = len(os.listdir(f"/proc/self/fd/{carrier}"))
    if number >= _MOST:
        raise OSError(f"more than {_MOST} folders lie beside mounts")
    own = f"/proc/self/fd/{carrier}/{number}"
    for name in ("", "/upper", "/work"):
        os.mkdir(own + name)
    with contextlib.suppress(OSError):  # it stays read-only
        lower = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        layers = f"lowerdir=/proc/self/fd/{lower},upperdir={own}/upper,workdir={own}/work"
        try:
            _mount("minato", path, "overlay", layers + options)
        finally:
            os.close(lower)


# ---- a filter ------------------------------------------------------------------------------


def _rules() -> dict[int, tuple[int, int, int, int]]:
    """For each call that waits, by its number on this machine: which of its arguments name files."""
    found = {(x86, arm, -1)[_MACHINE]: which for x86, arm, which in _CHANGES.values()}
    return {number: which for number, which in found.items() if number >= 0}


def filter_writes() -> int:
    """From now on calls of this process, which must have one thread, that name a file to change it
    wait until the listener allows them; of those that open one, only with a flag by which it could be
    changed. Writing to a descriptor is not filtered: opening it was. Children inherit the filter, and
    it cannot be removed. Returns the listener's descriptor."""
    if _MACHINE == 2:
        raise OSError(errno.ENOSYS, "the numbers of this machine's system calls are not known")
    opens = {_CHANGES["openat"][_MACHINE]: 2, _CHANGES["open"][_MACHINE]: 1}  # which argument has flags
    flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    # (code, instructions to skip if true, if not, value), by offsets in struct seccomp_data
    program = [(LOAD, 0, 0, 4), (IS, 1, 0, _AUDIT_ARCH[_MACHINE]), (RETURN, 0, 0, REFUSE)]
    program += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, _X32), (RETURN, 0, 0, REFUSE)]
    for hidden in _HIDDEN.values():
        program += [(IS, 0, 1, hidden[_MACHINE]), (RETURN, 0, 0, REFUSE)]
    for number in _rules():
        if (at := opens.get(number)) is None:
            program += [(IS, 0, 1, number), (RETURN, 0, 0, WAIT)]
        else:  # the lower half of the flags, on a little-endian processor
            program += [(IS, 0, 4, number), (LOAD, 0, 0, 16 + 8 * at), (HAS, 0, 1, flags)]
            program += [(RETURN, 0, 0, WAIT), (RETURN, 0, 0, ALLOW)]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    given = struct.pack("HP", len(program), ctypes.addressof(code))
    _call("prctl", PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    how = ctypes.c_ulong(NEW_LISTENER | SPEC_ALLOW)
    return _call("syscall", ctypes.c_long(_SECCOMP[_MACHINE]), ctypes.c_long(SET_MODE_FILTER), how, given)


class WriteGuard:
    """Decides in the keeper what the processes of a measurement may write. source: what gives the
    listener of their filter, or ends where there is none. folder: for their temporary files."""

    def __init__(self, source: socket.socket, folder: str) -> None:
        self.source: socket.socket | None = source
        self.listener: int | None = None
        self.folder = os.path.realpath(folder)
        self.caches = os.path.realpath(cache.folder())
        self.made: set[str] = set()  # names in /dev/shm
        self.rules = _rules()
        self.refused: str | None = None

    def waits(self) -> list[Any]:
        """What is readable when there is something to decide."""
        return [each for each in (self.source, self.listener) if each is not None]

    def allows(self) -> bool:
        """Lets the next call go on that is allowed. Else ``refused`` is the file that it would change."""
        if self.source is not None:
            _text, numbers, _flags, _address = socket.recv_fds(self.source, 1, 1)
            self.source.close()
            self.source, self.listener = None, next(iter(numbers), None)
        elif self.listener is not None:
            ready = select.poll()
            ready.register(self.listener, select.POLLIN)
            if not ready.poll(0)[0][1] & select.POLLIN:  # the filter's last process has ended
                self.close()
            else:
                with contextlib.suppress(FileNotFoundError):  # its process has been killed
                    self._decide(self.listener)
        return self.refused is None

    def _decide(self, listener: int) -> None:
        """Reads the next call that waits, and lets it go on if that is allowed."""
        call = bytearray(512)  # a later kernel's struct may be larger
        fcntl.ioctl(listener, NOTIF_RECV, call)
        number, pid, what, *given = struct.unpack_from("=QI4xi12x6Q", call)
        folder, path, folder2, path2 = self.rules[what]
        size = given[2] & 0xFFFFFFFF if what == _CHANGES["bind"][_MACHINE] else 0
        for at, name in ((folder, path), (folder2, path2)):
            if at >= 0 or name >= 0:
                base = ctypes.c_int(given[at]).value if at >= 0 else AT_FDCWD
                found = self._find_path(pid, base, given[name] if name >= 0 else 0, size)
                if found and not self._may_write(found):
                    self.refused = found
                    return
        fcntl.ioctl(listener, NOTIF_SEND, struct.pack("=QqiI", number, 0, 0, NOTIF_FLAG_CONTINUE))

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
        if self.listener is not None:
            os.close(self.listener)
        self.source = self.listener = None

    def _find_path(self, pid: int, folder: int, address: int, length: int) -> str | None:
        """None: of a socket that has no file. length: of a socket's address; 0 for a path."""
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # reads end where the memory does
                text = os.pread(memory.fileno(), length or 4096, address) if address else b""
        except OSError:
            return "a file with an unreadable name"
        if length:
            if text[:2] != struct.pack("H", 1) or text[2:3] in (b"", b"\0"):  # of AF_UNIX, with a name
                return None
            text = text[2:]
        name = os.fsdecode(text.partition(b"\0")[0])
        base = f"/proc/{pid}/cwd" if folder == AT_FDCWD else f"/proc/{pid}/fd/{folder}"
        with contextlib.suppress(OSError):
            base = os.readlink(base)
        whole = os.path.join(base, name) if name else base
        # the last part may be a link that is itself removed or replaced
        return os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))

    def _may_write(self, path: str) -> bool:
        target = os.path.realpath(path)
        inside = all(each.startswith((self.folder + "/", "/proc/")) for each in (path, target))
        # the folder of this user's caches in memory, or a file there; by number, one that has lost its name
        where, name = os.path.split(target)
        cached = target == self.caches or where == self.caches and name.startswith("cache-")
        if inside or path in self.made or cached and (path == target or path.startswith("/proc/")):
            return True
        with contextlib.suppress(OSError):
            return stat.S_ISCHR(os.stat(target).st_mode)
        if os.path.dirname(path) == "/dev/shm" and target == path:
            self.made.add(path)  # it is not there yet: shared memory and semaphores of the study
            return True
        return False


# ---- memory --------------------------------------------------------------------------------


def own_mappings() -> None:
    """Replaces memory that this process shares with the program, and maps of files that can be
    written to, by copies that it shares with its forks. Of what is too large for copies, pages are
    copied when they are written to; where there is no file of it, a write ends this process."""
    _libc.mmap.restype = ctypes.c_void_p
    left = _COPIED
    with open("/proc/self/maps") as file:
        lines = [line.split(None, 5) for line in file]
    shared = []
    for where, access, offset, _device, inode, *path in lines:
        begin, end = (int(part, 16) for part in where.split("-"))
        name = path[0].rstrip("\n") if path else ""
        device = name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero"))
        if access[1] == "w" and access[3] == "s" and not device and not name.startswith(("anon_inode:", "[")):
            shared.append((end - begin, begin, int(offset, 16), int(inode), name))
    for size, begin, at, number, name in sorted(shared):
        left -= size
        if left >= 0:
            _map_copy(begin, size)
        else:
            _map_privately(begin, size, at, number, name)


def _map_copy(begin: int, size: int) -> None:
    number = os.memfd_create("minato-analyze")
    os.ftruncate(number, size)
    old, done = memoryview((ctypes.c_char * size).from_address(begin)), 0
    with contextlib.suppress(OSError):  # behind the end of a file there is no memory
        while done < size:
            done += os.write(number, old[done:])
    _map(begin, size, MAP_SHARED, number, 0)
    os.close(number)


def _map_privately(begin: int, size: int, offset: int, inode: int, name: str) -> None:
    for path in (f"/proc/self/map_files/{begin:x}-{begin + size:x}", name):
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(number).st_ino == inode:
                    return _map(begin, size, MAP_PRIVATE, number, offset)
            finally:
                os.close(number)
    _call("mprotect", ctypes.c_void_p(begin), ctypes.c_size_t(size), PROT_READ)


def _map(begin: int, size: int, how: int, number: int, offset: int) -> None:
    made = _libc.mmap(
        ctypes.c_void_p(begin), ctypes.c_size_t(size), PROT_READ | PROT_WRITE, how | MAP_FIXED, number,
        ctypes.c_long(offset),
    )  # fmt: skip
    if made != begin:
        raise OSError(ctypes.get_errno(), "memory that the program shares could not be replaced")
