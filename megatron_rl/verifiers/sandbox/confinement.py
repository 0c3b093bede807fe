"""Confines the current process before it runs untrusted code. Only the standard library is used, because the process is
a bare interpreter that cannot import this package.

Invariants: after `confine` the process and its threads cannot start another process, send a signal, gain a privilege,
raise a limit, change the limit of their CPU time, or see a file that is not listed, and they can write only into their
own directory. They share nothing with another process but what was open before: no socket, no memory, no lock, no
message. All of this is enforced by the kernel, so it holds even if the program changes its interpreter.

Three means hide the files. `root` and `user` give the process a file system of its own, which holds only what is listed
and a tmpfs of limited size: `root` makes it with the capabilities of a privileged worker and then changes to a user id
that owns nothing, and `user` makes it in a user namespace. `landlock` leaves the files where they are and has the
kernel refuse the others (Landlock, Linux 5.13). The filter on system calls (seccomp) is the same with all three. It
also makes other namespaces unnecessary: where no process can be started, the tree to kill is one process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WORK = "/tmp"
"""The program's own directory, if it has a file system of its own."""

LAST_SYSTEM_CALL = 462
"""What Linux adds later (after mseal) does not exist for a program."""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # Other processes: their creation, signals, memory, limits and priorities.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "get_robust_list": (274, 100),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "prctl": (157, 167),
    "unshare": (272, 97),
    "setns": (308, 268),
    "timer_create": (222, 107),  # a timer can send any signal, SIGKILL too
    # The network, and everything that outlives a process or is shared by name.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # What all processes share with a file that they can read: who waits at its pages, and which are in memory.
    "futex_waitv": (449, 449),
    "futex_wake": (454, 454),
    "futex_wait": (455, 455),
    "futex_requeue": (456, 456),
    "fadvise64": (221, 223),
    "mincore": (27, 232),
    "cachestat": (451, 451),
    "sync": (162, 81),
    "syncfs": (306, 267),
    # Memory that no limit counts, and large or seldom used parts of the kernel.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    # Changes of files that Landlock does not judge.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
"""System calls that fail with EPERM: their numbers on x86_64 and on aarch64, which lacks the older ones. Calls that
need a capability are not listed, because the process has none."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> (its column in the tables of system calls, its AUDIT_ARCH)."""

CLONE3 = (435, 435)
CLONE, PRLIMIT, SETRLIMIT, FCNTL, FLOCK, IOCTL = (56, 220), (302, 261), (160, 164), (72, 25), (73, 32), (16, 29)
SOCKETPAIR, FUTEX, MADVISE = (53, 199), (202, 98), (28, 233)
"""System calls that are judged by their arguments, see `seccomp_filter`."""

# fcntl: F_DUPFD to F_GETLK and F_DUPFD_CLOEXEC. F_SETOWN and F_SETSIG would have the kernel send signals for us.
FCNTL_ALLOWED = (*range(6), 1030)
F_SETLK, F_SETLKW = 6, 7
# ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX. FIOSETOWN is like F_SETOWN.
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# madvise: what concerns the process's own view of memory, and not the pages of a file or the search for equal pages.
MADVISE_ALLOWED = (*range(5), 8, 10, 11, *range(14, 20), 102, 103)
RLIMIT_CPU, AF_UNIX, SOCK_STREAM, SOCK_NONBLOCK, SOCK_CLOEXEC, FUTEX_PRIVATE = 0, 1, 1, 0o4000, 0o2000000, 128

CLONE_THREAD, CLONE_NEWNS, CLONE_NEWUSER = 0x10000, 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGKILL = 9


class Confinement:
    """How one process is confined.

    Args:
        means: `root`, `user` or `landlock`.
        parent: the process whose end ends this one.
        visible: files and directories that the program may read, as absolute paths.
        devices: the devices that it may also write to.
        directory: the program's own directory, with `landlock`; the two others make one.
        num_threads: None leaves the number of threads to the limit on the memory.
    """

    # A dataclass would need 15 ms more for its imports, and a process needs 30 ms.
    def __init__(
        self,
        *,
        means: str,
        parent: int,
        visible: list[str],
        devices: list[str],
        directory: str | None,
        cpu_s: int,
        memory_bytes: int,
        files_bytes: int,
        num_files: int,
        num_threads: int | None,
    ) -> None:
        self.means, self.parent = means, parent
        self.visible, self.devices, self.directory = visible, devices, directory
        self.cpu_s, self.memory_bytes, self.files_bytes = cpu_s, memory_bytes, files_bytes
        self.num_files, self.num_threads = num_files, num_threads


libc = ctypes.CDLL(None, use_errno=True)


def confine(how: Confinement) -> None:
    """Confine this process, which must have one thread, for the rest of its life.

    Raises:
        OSError: the kernel refused a step; the message names it.
    """
    checked("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != how.parent:
        raise OSError(errno.ESRCH, "the process that started this one has ended")
    if how.means == "landlock":
        assert how.directory is not None
        os.chdir(how.directory)
    else:
        own_file_system(how)
    limit_resources(how)
    checked("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    drop_capabilities(leave_root=how.means == "root")
    # A change of the user id clears the signal that the parent's death sends, so it is asked for again.
    checked("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if how.means == "landlock":
        landlock(how)
    checked("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    filter_system_calls()


def checked(function: str, *arguments: Any) -> int:
    """The result of a function of the C library. Raises OSError if it is -1."""
    result: int = libc[function](*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}{arguments[:4]}: {os.strerror(code)}")
    return result


def own_file_system(how: Confinement) -> None:
    """A file system that holds the visible files, read-only, and a tmpfs of limited size."""
    os.umask(0o022)  # the program, perhaps as another user, must be able to enter the directories that are made here
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWNS if how.means == "root" else CLONE_NEWNS | CLONE_NEWUSER
    checked("unshare", flags)
    if how.means == "user":
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    with open("/proc/self/mountinfo", "rb") as file:  # bytes; \\040 stands for a space
        mounted = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]

    # The new root covers /tmp only until it becomes the root: below /host all old files are where they were.
    num_inodes = 1000 + how.files_bytes // 4096
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={how.files_bytes},nr_inodes={num_inodes},mode=755")
    os.mkdir("/tmp/host")
    os.chdir("/tmp")
    checked("pivot_root", b".", b"host")
    os.chdir("/")
    for path in how.devices:
        bind(path)
    for path in how.visible:
        bind(path)
        for place in [path, *(place for place in mounted if place.startswith(path + "/"))]:
            # Inside a user namespace a flag that the mount has must be repeated, or the kernel refuses.
            kept = os.statvfs(place).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
            mount(None, place, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
    checked("umount2", b"/host", MNT_DETACH)
    os.rmdir("/host")
    os.mkdir(WORK)
    os.chmod(WORK, 0o1777)
    os.chdir(WORK)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else text.encode() for text in (source, target, kind, options)]
    checked("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def bind(path: str) -> None:
    """Show a file or a directory of the old file system in the new one, at the same path."""
    if os.path.isdir("/host" + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount("/host" + path, path, None, MS_BIND | MS_REC)


def limit_resources(how: Confinement) -> None:
    # At the first limit the process gets SIGXCPU, which says what happened, but it may ignore this signal. The second
    # limit kills.
    resource.setrlimit(resource.RLIMIT_CPU, (how.cpu_s, how.cpu_s + 1))
    limits = {
        resource.RLIMIT_AS: how.memory_bytes,
        resource.RLIMIT_FSIZE: how.files_bytes,
        resource.RLIMIT_NOFILE: how.num_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    if how.num_threads is not None:
        limits[resource.RLIMIT_NPROC] = how.num_threads
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities(leave_root: bool) -> None:
    if leave_root:
        os.setgroups([])
        # The kernel counts the threads of a user, so each process gets a user of its own. A container may have fewer.
        for user in ((1 << 30) + os.getpid(), 65534):
            try:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                break
            except OSError as error:
                if error.errno != errno.EINVAL or user == 65534:
                    raise
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    checked("capset", header, none)


def landlock(how: Confinement) -> None:
    """Refuse all files but the visible ones; Landlock's numbers come from <linux/landlock.h>."""
    create, add, restrict = 444, 445, 446
    execute, write_file, read_file, read_directory, truncate = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    version = checked("syscall", create, None, 0, 1)
    handled = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    rules = checked("syscall", create, struct.pack("Q", handled), ctypes.c_size_t(8), 0)
    allowed = [(path, execute | read_file | read_directory) for path in how.visible]
    allowed += [(path, write_file | read_file | truncate) for path in how.devices]
    allowed.append((str(how.directory), handled))
    for path, rights in allowed:
        if not os.path.isdir(path):
            rights &= execute | write_file | read_file | truncate
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        checked("syscall", add, rules, 1, struct.pack("=Qi", rights & handled, place), 0)
        os.close(place)
    checked("syscall", restrict, rules, 0)
    os.close(rules)


def filter_system_calls() -> None:
    """Install the seccomp filter; it stays for the life of the process and of its threads."""
    filters = seccomp_filter(os.uname().machine)
    code = ctypes.create_string_buffer(filters, len(filters))
    program = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(code))
    checked("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


def seccomp_filter(machine: str) -> bytes:
    """The filter as a classic BPF program (struct sock_filter of <linux/filter.h>)."""
    column, architecture = ARCHITECTURES[machine]
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x50000
    refuse, missing, granted, again = error | errno.EPERM, error | errno.ENOSYS, error, error | errno.EAGAIN
    number_at, architecture_at, argument_at = 0, 4, 16
    code: list[tuple[int, int, int, int]] = []

    def rule(call: tuple[int, int], result: int, *tests: tuple[int, int, tuple[int, ...]]) -> None:
        """The result of a call if each of the given arguments passes its test with one of the values. Otherwise the
        next rule decides."""
        body = [(give, 0, 0, result)]
        for argument, test, values in reversed(tests):
            *others, last = values
            tried = [(test, len(values) - i, 0, value) for i, value in enumerate(others, 1)]
            body = [(load, 0, 0, argument_at + 8 * argument), *tried, (test, 0, len(body), last), *body]
        code.extend([(load, 0, 0, number_at), (equal, 0, len(body), call[column]), *body])

    code += [(load, 0, 0, architecture_at), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, number_at)]
    # Also the calls of the x32 interface, whose numbers begin at 2**30.
    code += [(at_least, 0, 1, LAST_SYSTEM_CALL + 1), (give, 0, 0, missing)]
    # Whoever reads the same file could wake, or wait for, a thread that waits at one of its pages. The C library waits
    # in such a way for the end of a thread; told that the value has changed, it looks again.
    rule(FUTEX, allow, (1, has_bits, (FUTEX_PRIVATE,)))
    rule(FUTEX, again)
    rule(MADVISE, allow, (2, equal, MADVISE_ALLOWED))
    rule(MADVISE, refuse)
    # Threads, but no process.
    rule(CLONE, allow, (0, has_bits, (CLONE_THREAD,)))
    rule(CLONE, refuse)
    rule(CLONE3, missing)  # its flags are in memory, where a filter cannot read them; the C library then uses clone
    # Limits of this process alone, except for the CPU time: whoever lowers it chooses the moment of a SIGKILL, which
    # then looks like one that came from outside.
    rule(PRLIMIT, allow, (0, equal, (0,)), (1, at_least, (RLIMIT_CPU + 1,)))
    rule(PRLIMIT, refuse)
    rule(SETRLIMIT, allow, (0, at_least, (RLIMIT_CPU + 1,)))
    rule(SETRLIMIT, refuse)
    # A lock can hold up every process that opens the same file, and tell it something. It is granted without being
    # taken: a program, for example with sqlite3, is alone with its own files, so there nobody sees the difference.
    rule(FLOCK, granted)
    rule(FCNTL, granted, (1, equal, (F_SETLK, F_SETLKW)))
    rule(FCNTL, allow, (1, equal, FCNTL_ALLOWED))
    rule(FCNTL, refuse)
    rule(IOCTL, allow, (1, equal, IOCTL_ALLOWED))
    rule(IOCTL, refuse)
    # asyncio needs a pair of connected streams, which reach nobody else. Datagram sockets could be sent to others.
    streams = tuple(SOCK_STREAM | flags for flags in (0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC))
    rule(SOCKETPAIR, allow, (0, equal, (AF_UNIX,)), (1, equal, streams))
    rule(SOCKETPAIR, refuse)
    code.append((load, 0, 0, number_at))
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def main(how: Confinement, role: Callable[..., None], text: int, status: int, *files: int) -> None:
    """Confine this process, say so, and play a role.

    Args:
        role: a function of a text and of the numbers of files.
        text: the number of a file with the text.
        status: the number of a pipe that gets `ready`, or why the process could not be confined. It is closed before
            the role begins, so no program can write to it.
        files: what the role gets.
    """
    with os.fdopen(text, encoding="utf-8", errors="surrogatepass", newline="") as file:
        content = file.read()
    try:
        confine(how)
    except OSError as error:
        os.write(status, str(error).encode())
        os._exit(1)
    os.write(status, b"ready")
    os.close(status)
    sys.argv = ["program.py"]
    role(content, *files)
