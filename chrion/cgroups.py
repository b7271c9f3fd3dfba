"""The CPU quota of the process's control groups, of version 1 and 2.

A process belongs to one group in each mounted hierarchy, and the quotas of all its ancestors apply as well: systemd may
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

#: Folder of this process.
_PROCESS = Path("/proc/self")


def cpu_quota() -> float | None:
    """Return the tightest quota of CPU time, in CPUs; None without a quota."""
    try:
        membership = _read(f"{_PROCESS}/cgroup")
    except OSError:
        return None
    quotas = [quota for folder in _folders(_PROCESS, membership) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


@functools.lru_cache(maxsize=16)
def _folders(process: Path, membership: str) -> tuple[str, ...]:
    """Return the folders of the process's groups and their ancestors.

    They are kept, since reading the mounts takes longer than all else; a process that is moved has another
    ``membership``.

    Args:
        process: Folder of the process in ``/proc``.
        membership: Content of its file ``cgroup``.
    """
    groups = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            groups["cgroup"] = path
    try:
        mounts = (process / "mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ()
    found: dict[str, None] = {}
    for kind, root, mount_point in _hierarchies(mounts):
        if kind in groups:
            found |= dict.fromkeys(_ancestry(mount_point, root, groups[kind]))
    return tuple(found)


def _hierarchies(mounts: str) -> Iterator[tuple[str, str, str]]:
    """Yield the type, root and mount point of each mounted hierarchy that may have CPU quotas."""
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields, system = before.split(), after.split()
        if not separator or len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2" or (system[0] == "cgroup" and "cpu" in system[2].split(",")):
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


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)  # an open file object takes twice as long
    try:
        return os.read(descriptor, 4096).decode(errors="surrogateescape").strip()
    finally:
        os.close(descriptor)
