"""Several hosts on one machine, for tests that need addresses, ssh, and wires that can be cut.

Owns: hosts and the network between them, from the first process to the last. Refuses to know: Ray and Baton.

    with Bed(["ctl", "client", "h0", "h1"], shared=[model_dir]) as bed:
        bed.run("ctl", "ssh", bed.address("h1"), "hostname")
        bed.cut("h1")

A host is a process in net, mount, pid, uts and ipc namespaces of its own, with its own address, name, sshd, /tmp,
/dev/shm, /run and home. The rest of the file system is the machine's, so what is installed there is installed on each
host. Hosts hang by a veth pair each on a bridge, which has a namespace of its own too: the machine's own network sees
nothing of it. The first process of a host ends with its standard input, and the kernel then ends the rest of it; so
nothing outlives the process that holds the bed, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK = "10.77.0"
FIRST_ADDRESS = 10
SWITCH = "switch"
TOOLS = {  # by the package that has it
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "pkill": "procps",
    "cc": "gcc",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 60.0
COMMAND_S = 120.0
OUTPUT_SHOWN = 4000
LOGINS = ("root", "sshd")
CLONE_NEWNET = 0x40000000

INIT = """#!/bin/bash
# The first process of host {name}. Orphans are reaped by bash.
set -e
mount --make-rprivate /
mount -t sysfs sysfs /sys
{shares}
mount --rbind {root}/tmp /tmp
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
mount -t proc proc /proc
for file in passwd shadow hosts; do mount --bind {root}/$file /etc/$file; done
hostname {name}
cd /
echo up
read -r || true
"""

SSHD = """ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
MaxStartups 100
MaxSessions 100
PrintMotd no
SetEnv {variables}
"""


class BedError(Exception):
    """This machine cannot carry a bed, or a host does not do what it should; the message is for a person."""


def require() -> None:
    """Raises BedError with all that this machine lacks."""
    lacks = [f"{tool} (package {package})" for tool, package in TOOLS.items() if _which(tool) is None]
    if os.geteuid() != 0:
        lacks.insert(0, "root's rights")
    if not Path("/dev/net/tun").exists():
        lacks.append("/dev/net/tun")
    if lacks:
        raise BedError(f"hosts out of namespaces need {', '.join(lacks)}")


@dataclass(slots=True)
class Host:
    """One host. `init` is its first process, seen from outside; None while it is off."""

    name: str
    address: str
    root: Path
    holder: subprocess.Popen[str] | None = None
    init: int | None = None
    delay: subprocess.Popen[str] | None = None


class Bed:
    """`names`: the hosts; they know one another by these. `shared`: directories below /tmp that hosts see as well.

    `variables` are in the environment of every shell and command on every host.
    """

    def __init__(
        self, names: Sequence[str], shared: Iterable[Path] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        require()
        self._root = Path(tempfile.mkdtemp(prefix="baton-bed-", dir="/var/tmp"))
        self._keys = self._root / "keys"
        inside = (path.resolve() for path in (*shared, Path(sys.prefix)))
        self._shared = [path for path in inside if path.is_relative_to("/tmp")]
        # Of the interpreter that runs this, whose packages hosts should have.
        path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
        self._variables = {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", **(variables or {})}
        self._hosts = {
            name: Host(name, f"{NETWORK}.{FIRST_ADDRESS + index}", self._root / name)
            for index, name in enumerate((SWITCH, *names))
        }

    def __enter__(self) -> Self:
        try:
            self._keys.mkdir()
            for name in ("host", "user"):
                _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"bed-{name}", "-f", str(self._keys / name))
            for name in self._hosts:
                self.boot(name)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def down(self) -> None:
        """Ends every process of every host and removes what they wrote."""
        for host in self._hosts.values():
            self._end_delay(host)
        for host in self._hosts.values():
            self._off(host)
        shutil.rmtree(self._root)

    # --- what a host is ---------------------------------------------------------------------------------------------

    @property
    def key(self) -> Path:
        """The private key with which root may log in on every host."""
        return self._keys / "user"

    @property
    def names(self) -> list[str]:
        return [name for name in self._hosts if name != SWITCH]

    def address(self, name: str) -> str:
        return self._hosts[name].address

    def name_of(self, address: str) -> str:
        """The host at an address, with or without a port."""
        wanted = address.rpartition(":")[0] or address
        return next(host.name for host in self._hosts.values() if host.address == wanted)

    def home(self, name: str) -> Path:
        """Root's home on that host, as the machine sees it too."""
        return self._hosts[name].root / "home"

    def processes(self, name: str) -> dict[int, str]:
        """Every process of a host but its first, by its id on the machine, with its command line."""
        init = self._hosts[name].init
        if init is None:
            return {}
        space = os.readlink(f"/proc/{init}/ns/pid")
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            # A process may end at any line of this.
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space and int(entry.name) != init:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if line:  # one that has ended has none
                        found[int(entry.name)] = line
        return found

    def outer_pid(self, name: str, pid: int) -> int:
        """The id on the machine of a process that has `pid` on its host."""
        for outer in self.processes(name):
            with suppress(OSError):
                status = Path(f"/proc/{outer}/status").read_text()
                inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
                if int(inner) == pid:
                    return outer
        raise BedError(f"{name} has no process {pid}")

    def shared_memory(self, name: str) -> list[str]:
        """What lies in a host's /dev/shm."""
        return sorted(entry.name for entry in Path(f"/proc/{self._hosts[name].init}/root/dev/shm").iterdir())

    # --- commands ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, *words: str, timeout_s: float = COMMAND_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command on a host; raises BedError with its output if it fails or takes too long."""
        command = [*self._inside(name), *words]
        # No pipe: ssh leaves a process behind for the next connection, which would keep it open.
        with tempfile.TemporaryFile("w+", dir=self._root, errors="replace") as said:
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, timeout=timeout_s
                )
                trouble = f"ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                check, trouble = True, f"took more than {timeout_s:.0f} s"
            said.seek(0)
            output = said.read()
        if check and trouble:
            raise BedError(f"{name}: {' '.join(words)} {trouble}: {output[-OUTPUT_SHOWN:]}")
        return subprocess.CompletedProcess(command, done.returncode, output)

    def _inside(self, name: str) -> list[str]:
        host = self._hosts[name]
        if host.init is None:
            raise BedError(f"{name} is off")
        variables = {
            "HOME": str(self.home(name)),
            "USER": "root",
            "LOGNAME": "root",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **self._variables,
        }
        spaces = ("--mount", "--pid", "--uts", "--ipc", "--net")
        words = ["env", "-C", str(self.home(name)), "-i", *(f"{key}={value}" for key, value in variables.items())]
        return ["nsenter", "--target", str(host.init), *spaces, "--", *words]

    @contextmanager
    def network_of(self, name: str) -> Iterator[None]:
        """Moves the calling thread, and threads that it starts from here on, into a host's network."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._hosts[name].init}/ns/net") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    # --- trouble ----------------------------------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """Pulls a host's network cable."""
        self._on_switch("ip", "link", "set", f"v-{name}", "down")

    def heal(self, name: str) -> None:
        self._on_switch("ip", "link", "set", f"v-{name}", "up")

    def crash(self, name: str) -> None:
        """Power off, without a word to anybody."""
        self._off(self._hosts[name])

    def boot(self, name: str) -> None:
        """Power on; what lies in its home and in /tmp is still there."""
        host = self._hosts[name]
        if host.init is not None:
            raise BedError(f"{name} is on")
        self._write_files(host)
        spaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child=KILL")
        host.holder = subprocess.Popen(
            ["unshare", *spaces, "bash", str(host.root / "init")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert host.holder.stdout is not None
        heard = select.select([host.holder.stdout], [], [], BOOT_S)[0]
        line = host.holder.stdout.readline() if heard else ""
        if line.strip() != "up":
            raise BedError(f"{name} does not start: {line.strip() or f'not within {BOOT_S:.0f} s'}")
        holder = host.holder.pid
        host.init = int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])
        self._wire(host)
        if name != SWITCH:
            # By its full name, as it starts itself again for each connection.
            sshd = _which("sshd")
            assert sshd is not None
            self.run(name, sshd, "-f", str(host.root / "sshd_config"), "-E", str(host.root / "sshd.log"))

    def freeze(self, name: str) -> None:
        """Stops every process of a host; its kernel still acknowledges what comes."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def rate(self, name: str, mbit_per_s: int | None) -> None:
        """Bounds what a host sends and what it is sent; None takes the bound away."""
        for enter, device in ((self._net(name), "eth0"), (self._net(SWITCH), f"v-{name}")):
            subprocess.run([*enter, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True)
            if mbit_per_s is not None:
                bucket = ("rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "50ms")
                _do(*enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def delay(self, name: str, one_way_ms: float | None, mbit_per_s: int = 0) -> None:
        """Makes a host's wire that long, each way, and that slow if a rate is given; None makes it plain again."""
        host = self._hosts[name]
        self._end_delay(host)
        if one_way_ms is None:
            return
        program = self._root / "netdelay"
        if not program.exists():
            _do("cc", "-O2", "-Wall", "-o", str(program), str(Path(__file__).with_name("netdelay.c")))
        link, tap = f"v-{name}", f"t-{name}"
        self._on_switch("ip", "link", "set", link, "nomaster")
        host.delay = subprocess.Popen(
            [*self._net(SWITCH), str(program), link, tap, str(round(one_way_ms * 1000)), str(mbit_per_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert host.delay.stdout is not None
        line = host.delay.stdout.readline().strip()
        if line != "ready":
            raise BedError(f"the wire of {name} cannot be delayed: {line}")
        self._on_switch("ip", "link", "set", tap, "master", "bridge", "up")

    # --- private ----------------------------------------------------------------------------------------------------

    def _write_files(self, host: Host) -> None:
        home, tmp = host.root / "home", host.root / "tmp"
        for directory in (home, tmp):
            directory.mkdir(parents=True, exist_ok=True)
        tmp.chmod(0o1777)
        shares = []
        for path in self._shared:
            place = tmp / path.relative_to("/tmp")
            place.mkdir(parents=True, exist_ok=True)
            shares.append(f"mount --rbind {path} {place}")
        variables = " ".join(f"{name}={value}" for name, value in self._variables.items())
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[0] not in LOGINS]
        users = [f"root:x:0:0:root:{home}:/bin/bash", "sshd:x:74:65534:sshd:/run/sshd:/usr/sbin/nologin", *others]
        texts = {
            "init": INIT.format(name=host.name, root=host.root, shares="\n".join(shares)),
            "passwd": "\n".join(users) + "\n",
            "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
            "hosts": "127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in self._hosts.values()),
            "sshd_config": SSHD.format(address=host.address, keys=self._keys, variables=variables),
            # A login shell's /etc/profile has set a PATH of its own by now.
            "home/.bashrc": f"export {variables}\n",
            "home/.bash_profile": ". ~/.bashrc\n",
        }
        for name, text in texts.items():
            (host.root / name).write_text(text)
        (host.root / "shadow").chmod(0o600)

    def _wire(self, host: Host) -> None:
        if host.name == SWITCH:
            self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
            self._on_switch("ip", "link", "set", "bridge", "up")
            return
        link = f"v-{host.name}"
        peer = ("peer", "name", "eth0", "netns", str(host.init))
        self._on_switch("ip", "link", "add", link, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", link, "master", "bridge", "up")
        enter = self._net(host.name)
        number = int(host.address.rpartition(".")[2])
        _do(*enter, "ip", "link", "set", "lo", "up")
        # As a real machine, it has the same one after a boot: others may not have noticed that it was away.
        _do(*enter, "ip", "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
        _do(*enter, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        _do(*enter, "ip", "link", "set", "eth0", "up")

    def _net(self, name: str) -> list[str]:
        """Words before a command of the machine that is to see a host's network."""
        return ["nsenter", "--target", str(self._hosts[name].init), "--net", "--"]

    def _on_switch(self, *words: str) -> None:
        _do(*self._net(SWITCH), *words)

    def _signal(self, name: str, number: int) -> None:
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end_delay(self, host: Host) -> None:
        if host.delay is None:
            return
        _end(host.delay)
        host.delay = None
        if host.init is not None:
            self._on_switch("ip", "link", "set", f"v-{host.name}", "master", "bridge")

    def _off(self, host: Host) -> None:
        if host.holder is None:
            return
        if host.init is not None:
            with suppress(ProcessLookupError):
                os.kill(host.init, signal.SIGKILL)
        _end(host.holder)
        if host.init is not None and host.name != SWITCH and self._hosts[SWITCH].init is not None:
            # The kernel takes a namespace's end of a pair away in its own time, and the name would be taken at boot.
            subprocess.run([*self._net(SWITCH), "ip", "link", "del", f"v-{host.name}"], capture_output=True)
        host.holder = host.init = None


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")


def _do(*words: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BedError(f"{' '.join(words)} ended with {done.returncode}: {done.stdout.strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process that ends with its standard input."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
    if process.stdout is not None:
        process.stdout.close()


def _enter(space: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def await_gone(pids: Iterable[int], timeout_s: float = 5.0) -> list[int]:
    """Waits for processes to be gone; returns those that are not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    return left


if __name__ == "__main__":
    try:
        require()
    except BedError as lacking:
        sys.exit(str(lacking))
