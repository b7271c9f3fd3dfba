"""Limits of control groups, in the layouts of version 1 and 2 that systems and containers have."""

from __future__ import annotations

from pathlib import Path

import pytest

from chrion.machine.cgroups import cpu_quota, free_memory
from seams.machine import set_free_memory

V2 = "30 25 0:26 {root} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 25 0:27 {root} {at} rw,nosuid - cgroup cgroup rw,{controllers}"


class FakeSystem:
    """A folder of a process and mounted hierarchies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts = ["29 25 0:25 / / rw - ext4 /dev/sda rw"]

    def mount(self, line: str, at: str, *, root: str = "/", controllers: str = "") -> None:
        """Mount a hierarchy at a folder below that of the system."""
        at = str(self.folder / at).replace(" ", r"\040")
        self.mounts.append(line.format(root=root.replace(" ", r"\040"), at=at, controllers=controllers))

    def put(self, name: str, text: str) -> None:
        """Write a file of a hierarchy."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def process(self, *membership: str) -> Path:
        """Return the folder of a process in the given groups."""
        self.put("proc/cgroup", "\n".join(membership))
        self.put("proc/mountinfo", "\n".join(self.mounts))
        return self.folder / "proc"

    def quota(self, *membership: str) -> float | None:
        """Return the quota of a process in the given groups."""
        return cpu_quota(self.process(*membership))


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    """Return a system without hierarchies."""
    return FakeSystem(tmp_path)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("200000 100000", 2.0), ("150000 100000", 1.5), ("broken", None)]
)
def test_a_group_of_version_2(system: FakeSystem, text: str, quota: float | None) -> None:
    """The quota of a container's root, and of a process below the root, is read."""
    system.mount(V2, "cg")
    system.put("cg/cpu.max", text)
    assert system.quota("0::/") == quota
    system.put("cg/user.slice/cpu.max", "max 100000")
    assert system.quota("0::/user.slice") == quota


@pytest.mark.parametrize(
    ("slices", "quota"), [(("max", "300000", "max"), 3.0), (("400000", "300000", "200000"), 2.0), (("100000",), 1.0)]
)
def test_the_tightest_ancestor_counts(system: FakeSystem, slices: tuple[str, ...], quota: float) -> None:
    """A service without a quota in a slice with one is limited by the slice."""
    system.mount(V2, "cg")
    path = ""
    for at, limit in enumerate(slices):
        path += f"/part{at}.slice"
        system.put(f"cg{path}/cpu.max", f"{limit} 100000")
    system.put("cg/other.slice/cpu.max", "50000 100000")  # of other processes
    assert system.quota(f"0::{path}/app.service") == quota


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_a_group_of_version_1(system: FakeSystem, controllers: str) -> None:
    """The hierarchy is found by its controllers, wherever it is mounted."""
    system.mount(V1, "memory here", controllers="memory")
    system.mount(V1, "cpu here", controllers=controllers)
    system.put("memory here/job/cpu.cfs_quota_us", "100000")
    system.put("cpu here/job/cpu.cfs_quota_us", "-1")
    system.put("cpu here/job/cpu.cfs_period_us", "100000")
    assert system.quota("5:memory:/job", f"4:{controllers}:/job") is None
    system.put("cpu here/job/cpu.cfs_quota_us", "125000")
    system.put("cpu here/job/cpu.cfs_period_us", "50000")
    assert system.quota("5:memory:/job", f"4:{controllers}:/job/task", "0::/") == 2.5


def test_both_versions(system: FakeSystem) -> None:
    """In a hybrid layout only version 1 has the controller of CPUs; the group of version 2 has another path."""
    system.mount(V1, "cpu", controllers="cpu")
    system.mount(V2, "unified")
    system.put("cpu/a/cpu.cfs_quota_us", "300000")
    system.put("cpu/a/cpu.cfs_period_us", "100000")
    system.put("unified/b/cgroup.procs", "")
    assert system.quota("1:name=systemd:/b", "2:cpu:/a", "0::/b") == 3.0


@pytest.mark.parametrize(
    ("root", "group"),
    [
        ("/docker/1f", "/docker/1f"),  # a container without a namespace of its own
        ("/", "/"),  # with one
        ("/docker/1f", "/"),
        ("/", "/../1f"),  # moved out of its namespace
        ("/../..", "/"),
        ("/docker/1f", "/docker/2a"),
    ],
)
def test_the_mount_point_stands_for_the_group(system: FakeSystem, root: str, group: str) -> None:
    """Containers see their group as the root of the mount, whatever its name is."""
    system.mount(V2, "cg", root=root)
    system.put("cg/cpu.max", "200000 100000")
    assert system.quota(f"0::{group}") == 2.0


def test_a_group_below_the_mounted_one(system: FakeSystem) -> None:
    """The path below the mount's root leads to the group, also from a namespace that starts below that root."""
    system.mount(V2, "cg", root="/kube pods/pod1")
    system.put("cg/a:b/cpu.max", "200000 100000")
    assert system.quota("0::/kube pods/pod1/a:b") == 2.0
    system.mounts.clear()
    system.mount(V2, "cg", root="/..")
    assert system.quota("0::/../a:b") == 2.0


def test_a_process_that_is_moved(system: FakeSystem) -> None:
    """The group and its quota are read again by each call."""
    system.mount(V2, "cg")
    system.put("cg/a/cpu.max", "200000 100000")
    system.put("cg/b/cpu.max", "300000 100000")
    assert system.quota("0::/a") == 2.0
    assert system.quota("0::/b") == 3.0
    system.put("cg/b/cpu.max", "100000 100000")
    assert system.quota("0::/b") == 1.0


def test_systems_without_groups(system: FakeSystem) -> None:
    """Without mounts, without a group, or outside Linux there is no quota."""
    assert system.quota("0::/a") is None
    system.mount(V2, "cg")
    system.put("cg/cpu.max", "200000 100000")
    assert system.quota("5:memory:/") is None
    assert cpu_quota(system.folder / "none") is None


def test_the_free_memory_of_a_group_of_version_2(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ancestor with the least memory left counts, and no more than the system has."""
    set_free_memory(monkeypatch, 10_000)
    system.mount(V2, "cg")
    process = system.process("0::/slice/service")
    assert free_memory(process) == 10_000
    system.put("cg/slice/service/memory.max", "max")
    system.put("cg/slice/service/memory.current", "700")
    system.put("cg/slice/memory.max", "3000")
    system.put("cg/slice/memory.current", "1000")
    assert free_memory(process) == 2000
    system.put("cg/slice/memory.current", "4000")
    assert free_memory(process) == 0
    system.put("cg/slice/memory.max", "90000")
    assert free_memory(process) == 10_000


def test_the_free_memory_of_a_group_of_version_1(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of the memory controller counts, not that of another one."""
    set_free_memory(monkeypatch, 10_000)
    system.mount(V1, "memory", controllers="memory")
    system.mount(V1, "cpu", controllers="cpu,cpuacct")
    for controller, limit in (("memory", 5000), ("cpu", 2000)):
        system.put(f"{controller}/a/memory.limit_in_bytes", str(limit))
        system.put(f"{controller}/a/memory.usage_in_bytes", "1500")
    assert free_memory(system.process("4:memory:/a", "3:cpu,cpuacct:/a")) == 3500
