"""The CPU quota and the memory limit of the process's control groups, of version 1 and 2.

A process belongs to one group in each mounted hierarchy, and the limits of all its ancestors apply as well: systemd may
limit a slice and not the service in it. The kernel names the groups in ``/proc/self/cgroup``, relative to
the root of the process's cgroup namespace, and the mounted hierarchies in ``/proc/self/mountinfo`` (manual pages
cgroups(7) and proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

#: Folder of this process.
PROCESS = Path("/proc/self")


def cpu_quota(process: Path = PROCESS) -> float | None:
    """Return the tightest quota of CPU time, in CPUs; None without a quota."""
    return min((quota for folder in _groups(process, "cpu") if (quota := _quota(folder)) is not None), default=None)


def free_memory(process: Path = PROCESS) -> int:
    """Return the memory in bytes that the process may still allocate, by the system and by its control groups.

    In a group, cached files count as used, although the kernel would drop them first.
    """
    lefts = [left for folder in _groups(process, "memory") if (left := _memory_left(folder)) is not None]
    return min([psutil.virtual_memory().available, *lefts])


def _groups(process: Path, controller: str) -> tuple[str, ...]:
    """Return the folders of the process's groups and their ancestors that may limit a resource."""
    try:
        return _folders(process, _read(f"{process}/cgroup"), controller)
    except OSError:
        return ()


@functools.lru_cache(maxsize=32)
def _folders(process: Path, membership: str, controller: str) -> tuple[str, ...]:
    """Return the folders of the process's groups and their ancestors.

    They are kept, since reading the mounts takes longer than all else; a process that is moved has another
    ``membership``.

    Args:
        process: Folder of the process in ``/proc``.
        membership: Content of its file ``cgroup``.
        controller: Name of the resource's controller in version 1.
    """
    groups = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = path
        elif controller in controllers.split(","):
            groups["cgroup"] = path
    try:
        mounts = (process / "mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ()
    folders: dict[str, None] = {}
    for kind, root, mount_point in _hierarchies(mounts, controller):
        if kind in groups:
            folders |= dict.fromkeys(_ancestry(mount_point, root, groups[kind]))
    return tuple(folders)


def _hierarchies(mounts: str, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield the type, root and mount point of each mounted hierarchy that may have limits of a controller."""
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields, system = before.split(), after.split()
        if not separator or len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2" or (system[0] == "cgroup" and controller in system[2].split(",")):
            yield system[0], _unescape(fields[3]), _unescape(fields[4])


def _ancestry(mount_point: str, root: str, group: str) -> Iterator[str]:
    """Yield the folders of a group and of its ancestors, as far as they are mounted.

    A container may see its own group as the mount's root under another name, and a process may have been moved out of
    its namespace (``/../other``). If the group is not below the root, the mount point stands for it.
    """
    above, parts = _split(root), _split(group)
    below = parts[len(above) :] if parts[: len(above)] == above else []
    if ".." in below:
        below = []
    for count in range(len(below), -1, -1):
        yield "/".join([mount_point.rstrip("/"), *below[:count]])


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _unescape(text: str) -> str:
    """Decode the octal codes that stand for blanks and backslashes in a table of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def _quota(folder: str) -> float | None:
    """Return the quota of one group in CPUs; None without a quota."""
    try:
        quota, period = _read(f"{folder}/cpu.max").split()
    except (OSError, ValueError):
        try:
            quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
        except OSError:  # the root has none, and a group may have been removed
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None


def _memory_left(folder: str) -> int | None:
    """Return the memory in bytes that one group may still use; None without a limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            return max(0, int(_read(f"{folder}/{limit}")) - int(_read(f"{folder}/{usage}")))
        except (OSError, ValueError):  # of the other version, the root, a group that was removed, or "max"
            continue
    return None


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)  # an open file object takes twice as long
    try:
        return os.read(descriptor, 4096).decode(errors="surrogateescape").strip()
    finally:
        os.close(descriptor)
