"""What the emulated machine boots: Debian's kernel with Soft-RoCE, unpacked from its packages and never installed.

All of it lies in one folder and is made once for each list of what is wanted. apt checks the packages' signatures;
which versions they were is in `packages.txt` there.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "rdma": "iproute2"}
"""What the host must have, and Debian's packages of them."""
PACKAGES = (
    "kmod", "libkmod2", "libibverbs1", "ibverbs-providers", "libibverbs-dev", "librdmacm1", "ibverbs-utils",
    "libnl-3-200", "libnl-route-3-200", "perftest", "libibumad3", "libpci3",
)  # fmt: skip
"""Laid over the host's files, which the machine sees as well. Installing them would upgrade the host's udev."""
MODULES = (
    "drivers/infiniband/core", "drivers/infiniband/sw", "drivers/net/dummy.ko", "drivers/net/veth.ko",
    "drivers/virtio", "net/9p", "fs/9p",
    "fs/netfs", "fs/fscache", "fs/overlayfs", "net/ipv4/udp_tunnel.ko", "net/ipv6/ip6_udp_tunnel.ko", "net/core",
    "net/sched/sch_netem.ko", "fs/configfs", "crypto", "arch/x86/crypto", "lib",
)  # fmt: skip
"""Of the kernel's."""
IN_INITRAMFS = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
fail() { echo "machine: $1 failed"; echo o > /proc/sysrq-trigger; sleep 9; }
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read module; do insmod /modules/$module || echo "machine: insmod $module failed"; done < /modules/order
share() { mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,$1 $2 $3 || fail "mounting $2"; }
share ro,cache=loose host /host
share ro,cache=loose added /added
mount -t tmpfs -o size=75% tmpfs /upper; mkdir -p /upper/files /upper/work
mount -t overlay -o lowerdir=/added:/host,upperdir=/upper/files,workdir=/upper/work overlay /new || fail overlay
for folder in proc sys dev; do mkdir -p /new/$folder; mount --move /$folder /new/$folder; done
mkdir -p /new/out /new/dev/pts /new/dev/shm
share rw out /new/out
mount -t tmpfs shm /new/dev/shm; mount -t devpts devpts /new/dev/pts; mount -t tmpfs run /new/run
mkdir /new/run/tmp; export TMPDIR=/run/tmp
exec switch_root /new /bin/bash /out/start
"""


class Missing(Exception):
    """The machine cannot be made here; the message says what is missing and how to get it."""


def made(cache: Path) -> Image:
    """The one in this folder, made there unless that was done before; a minute. Raises Missing."""
    absent = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if absent:
        install = f"apt-get install --no-install-recommends {' '.join(absent)}"
        raise Missing(f"it needs {' and '.join(absent)}: as root, {install}")
    wanted = hashlib.sha256(repr((PACKAGES, MODULES, IN_INITRAMFS, INIT)).encode()).hexdigest()[:12]
    ready = Image(cache / wanted)
    if not ready.folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as folder:
            making = Image(Path(folder) / "image")
            making.make()
            with suppress(OSError):  # where another process was faster
                making.folder.rename(ready.folder)
    return ready


class Image:
    """The folder that has the kernel, the initramfs, and the files that are laid over the host's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.added, self.kernel, self.initramfs = folder / "added", folder / "vmlinuz", folder / "initramfs.gz"

    def make(self) -> None:
        """Raises Missing."""
        packages = self.folder / "packages"
        packages.mkdir(parents=True)
        try:
            kernel = _kernel_package()
            _run("apt-get", "download", "-qq", kernel, *PACKAGES, cwd=packages)
            names = sorted(path.name for path in packages.iterdir())
            self._unpack(packages, kernel.removeprefix("linux-image-"))
        except (OSError, subprocess.SubprocessError) as error:
            raise Missing(f"Debian's packages cannot be had or used: {error}") from error
        shutil.rmtree(packages)
        (self.folder / "packages.txt").write_text("\n".join(names) + "\n")

    def _unpack(self, packages: Path, version: str) -> None:
        whole = self.folder / "whole"
        for package in packages.iterdir():
            _run("dpkg-deb", "-x", package, whole if package.name.startswith("linux-image-") else self.added)
        for name in ("bin", "sbin", "lib"):  # of the host these are links into /usr
            if (self.added / name).is_dir():
                shutil.copytree(self.added / name, self.added / "usr" / name, symlinks=True, dirs_exist_ok=True)
                shutil.rmtree(self.added / name)
        (whole / "boot" / f"vmlinuz-{version}").rename(self.kernel)
        modules = self.added / "usr" / "lib" / "modules" / version
        modules.mkdir(parents=True)
        for path in (whole / "lib" / "modules" / version).glob("modules.*"):
            path.rename(modules / path.name)
        for name in MODULES:
            target = modules / "kernel" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (whole / "lib" / "modules" / version / "kernel" / name).rename(target)
        shutil.rmtree(whole)
        tree = self.folder / "tree"
        (tree / "lib").mkdir(parents=True)
        (tree / "lib" / "modules").symlink_to(self.added / "usr" / "lib" / "modules")
        self._kmod("depmod", "-b", tree, version)
        self._make_initramfs(tree, version)

    def _make_initramfs(self, tree: Path, version: str) -> None:
        files = self.folder / "initramfs"
        for name in ("bin", "modules", "proc", "sys", "dev", "new", "host", "upper", "added"):
            (files / name).mkdir(parents=True)
        shutil.copy(str(shutil.which("busybox")), files / "bin" / "busybox")
        order: list[str] = []
        for module in IN_INITRAMFS:
            for line in self._kmod("modprobe", "-d", tree, "-S", version, "--show-depends", module).splitlines():
                kind, _, path = line.strip().partition(" ")
                if kind == "insmod" and Path(path).name not in order:
                    shutil.copy(path, files / "modules")
                    order.append(Path(path).name)
        (files / "modules" / "order").write_text("".join(f"{name}\n" for name in order))
        (files / "init").write_text(INIT)
        (files / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(files)) for path in sorted(files.rglob("*")))
        archive = subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"], cwd=files, input=names.encode(), capture_output=True, check=True
        ).stdout
        self.initramfs.write_bytes(gzip.compress(archive, 1))
        shutil.rmtree(files)

    def _kmod(self, name: str, *arguments: str | Path) -> str:
        """Call kmod, which is unpacked and not installed, by one of the names that it has."""
        program = self.folder / name
        program.unlink(missing_ok=True)
        program.symlink_to(self.added / "usr" / "bin" / "kmod")
        libraries = str(self.added / "usr" / "lib" / "x86_64-linux-gnu")
        return _run(program, *arguments, environment={**os.environ, "LD_LIBRARY_PATH": libraries})


def _kernel_package() -> str:
    """Of the kernel that the distribution has now."""
    for line in _run("apt-cache", "depends", "linux-image-amd64").splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise Missing("apt knows no linux-image-amd64: it needs a Debian of x86-64, and `apt-get update`")


def _run(*command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """What it printed. Raises OSError, or SubprocessError with what it complained of."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{command[0]} says {done.stderr.strip()[-500:]}")
    return done.stdout
