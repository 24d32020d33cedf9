"""How often the system has killed a process because memory ran out, if the system says so."""

from __future__ import annotations

from pathlib import Path

#: by version of control groups: where the group is mounted, and the file that counts kills
_GROUPS = {1: ("sys/fs/cgroup/memory", "memory.oom_control"), 2: ("sys/fs/cgroup", "memory.events")}
_KEY = "oom_kill"

GROUP_SAYS = (
    "Its control group has reached its memory limit, and the system has killed a process for it "
    "({file} counts it): lower num_workers, let samples take less memory, or raise the limit."
)
MACHINE_SAYS = (
    "The machine has run out of memory, and the system has killed a process for it (/proc/vmstat "
    "counts it): lower num_workers, or let samples take less memory."
)
MAYBE = "If you did not do this, the system may have run out of memory."


def _counted(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == _KEY:
                return int(number)
    except (OSError, ValueError):
        pass
    return None


def _of_group(root: Path) -> tuple[Path, int] | None:
    """The file that counts for this process's group, and its count. In a container, the path may
    be relative to the host, and the group may be at the mount point itself."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
        if version == 0:
            continue
        mount, name = _GROUPS[version]
        for folder in (root / mount / path.lstrip("/"), root / mount):
            count = _counted(folder / name)
            if count is not None:
                return folder / name, count
    return None


class OomKills:
    """Finds out whether a killed process was killed because memory ran out: whether the system
    counts more such kills than at the last check."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._group, self._machine = self._look()
        self._latest: tuple[int, str] | None = None  # the last process asked about, and the answer

    def _look(self) -> tuple[tuple[Path, int] | None, int | None]:
        return _of_group(self._root), _counted(self._root / "proc/vmstat")

    def oom_note(self, pid: int) -> str:
        """The sentence to add to the message that the process was killed."""
        if self._latest is None or self._latest[0] != pid:
            group, machine = self._look()
            text = MAYBE
            if group and self._group and group[0] == self._group[0] and group[1] > self._group[1]:
                text = GROUP_SAYS.format(file=group[0])
            elif machine is not None and self._machine is not None and machine > self._machine:
                text = MACHINE_SAYS
            self._group, self._machine = group, machine
            self._latest = pid, text
        return self._latest[1]
