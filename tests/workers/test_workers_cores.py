"""Replicas of a model share the cores, and cores are what the affinity and the control groups allow."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.system import cpus
from workers.workers_harness import call, first_value, pool_of


@pytest.mark.parametrize(("replicas", "count"), [(1, 12), (2, 6), (5, 2), (12, 1), (100, 1)])
def test_threads_per_replica_divide_the_cores(monkeypatch: pytest.MonkeyPatch, replicas: int, count: int) -> None:
    monkeypatch.setattr(cpus, "cores", lambda: 12)
    assert cpus.threads_per_replica(replicas) == count


@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_linear_algebra_of_a_replica_uses_its_share_of_the_cores(placement: str) -> None:
    limits = pytest.importorskip("threadpoolctl").threadpool_limits
    before = limits(limits=cpus.cores())
    try:
        async with pool_of(placement, "Threads", replicas=cpus.cores()) as pool:
            assert first_value(await call(pool)) == 1
    finally:
        before.restore_original_limits()


def write_groups(folder: Path, groups: str, mounts: str, quotas: dict[str, str]) -> Path:
    """Write the files of a process and of its control groups; `TOP` in `mounts` is the folder of the groups."""
    (folder / "proc").mkdir()
    (folder / "proc" / "cgroup").write_text(groups)
    (folder / "proc" / "mountinfo").write_text(mounts.replace("TOP", str(folder / "groups")))
    for name, text in quotas.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc"


def mounts_2(root: str) -> str:
    return f"30 23 0:26 {root} TOP rw,nosuid - cgroup2 cgroup2 rw\n"


def mounts_1(root: str, controllers: str) -> str:
    others = "32 23 0:28 / /elsewhere rw shared:5 - cgroup cgroup rw,memory\n33 1 0:2 / / rw - ext4 /dev/vda rw\n"
    return f"31 23 0:27 {root} TOP rw - cgroup cgroup rw,{controllers}\n{others}"


def quota_1(quota: int, period: int = 100_000, folder: str = "") -> dict[str, str]:
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "mounts", "quotas", "expected"),
    [
        ("0::/\n", mounts_2("/"), {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", mounts_2("/"), {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", mounts_2("/"), {}, math.inf),
        ("0::/a/b\n", mounts_2("/"), {"cpu.max": "9 1", "a/cpu.max": "2 1", "a/b/cpu.max": "3 1"}, 2),
        ("0::/host/pod\n", mounts_2("/host/pod"), {"cpu.max": "50000 100000"}, 0.5),
        ("0::/host/pod\n", mounts_2("/other"), {"cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/\n0::/\n", mounts_1("/", "cpu,cpuacct"), quota_1(200_000), 2),
        ("4:cpu,cpuacct:/\n0::/\n", mounts_1("/", "cpu"), quota_1(-1), math.inf),
        ("4:cpuset:/\n", mounts_1("/", "cpuset"), quota_1(200_000), math.inf),
        ("7:memory:/x\n4:cpuacct,cpu:/a\n", mounts_1("/", "cpu,cpuacct"), quota_1(25_000, 50_000, "a/"), 0.5),
        ("nonsense\n", "1 2 3 / / rw - ext4 /dev/vda rw\n", {}, math.inf),
    ],
)
def test_quotas_of_control_groups_hold(
    tmp_path: Path, groups: str, mounts: str, quotas: dict[str, str], expected: float
) -> None:
    assert cpus.cpu_quota(write_groups(tmp_path, groups, mounts, quotas)) == expected
    assert cpus.cpu_quota(tmp_path / "missing") == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(0.2, 1), (1.0, 1), (1.5, 2), (2.5, 3), (math.inf, 8), (100.0, 8)])
def test_cores_are_those_of_the_quota_rounded_up(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    monkeypatch.setattr(cpus, "affinity", lambda: 8)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    assert cpus.cores() == cores
    assert cpus.thread_limit() == (None if cores == 8 else cores)
    assert cpus.thread_limit(4) == max(1, cores // 4)


def test_replicas_divide_the_quota_and_leave_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "affinity", lambda: 64)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: 6.0)
    monkeypatch.setattr(cpus, "_limited", set())
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
    for name in names[1:]:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    cpus.limit_default_threads()
    assert [os.environ[name] for name in names] == ["5", "6", "6"]
    assert cpus.variables_of_threads(os.environ, 3) == {"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group with a quota of one CPU. Skips without the right to make one."""
    for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = top / f"dragoman-{os.getpid()}"
        try:
            group.mkdir()
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_quota_us").write_text("100000")
            else:
                (group / "cpu.max").write_text("100000 100000")
        except OSError:
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group can be made")


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are of Linux")
def test_a_process_in_a_limited_group_uses_one_core(limited_group: Path) -> None:
    script = "import sys; open(sys.argv[1], 'w').write('0'); from dragoman.system import cpus; print(cpus.cores())"
    command = [sys.executable, "-c", script, str(limited_group / "cgroup.procs")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
