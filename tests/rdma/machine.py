"""Run a command in an emulated machine that has RDMA: real queue pairs over Soft-RoCE, without a card.

    machine.py COMMAND...

The machine sees the host's files at the same paths, to read: a checkout, an environment, Python. What it writes is gone
afterwards, except below /out, which is the folder that `--out` names. It ends with the command, with its exit status.
qemu emulates the processor, so what it measures says nothing about RDMA.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdma.image import Missing, made

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "rdma"
LIMIT_S = 2400.0
MEMORY_MIB = 1024
PROCESSOR = "qemu64,+popcnt,+ssse3,+sse4.1,+sse4.2"
"""numpy needs these; a processor with more is emulated several times more slowly."""
UNAVAILABLE = 77
"""Exit status where the machine cannot be made here."""
VARIABLE = "MOONCAKE_IN_MACHINE"
"""Set inside of it."""
TORCH = "MOONCAKE_TORCH"
"""Names the packages of an engine's environment inside of it, of which torch is one."""

START = f"""export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8 {VARIABLE}=1
hostname machine; ulimit -l unlimited
ip link set lo up
for module in dummy rdma_rxe ib_uverbs; do modprobe $module; done
for number in 0 1; do
  ip link add rail$number type dummy
  ip link set rail$number mtu 9000 address 02:00:0a:4d:0$number:01 up
  ip addr add 10.77.$number.1/24 dev rail$number
  rdma link add rxe$number type rxe netdev rail$number
done
"""


def run(command: Sequence[str], out: Path, variables: Mapping[str, str] | None = None) -> int:
    """Its exit status; what it prints goes to the standard output. Raises Missing.

    Args:
        out: the folder that the command sees as /out.
        variables: of its environment.
    """
    image = made(FOLDER)
    started, status = out / "started", out / "status"
    for path in (started, status):
        path.unlink(missing_ok=True)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (variables or {}).items())
    (out / "start").write_text(
        f"{START}touch /out/started\n{exports}cd {shlex.quote(os.getcwd())}\n{shlex.join(command)}\n"
        "echo $? > /out/status; sync; echo o > /proc/sysrq-trigger; sleep 60\n"
    )
    read = ",readonly=on"
    shares = [("host", Path("/"), f"{read},multidevs=remap"), ("added", image.added, read), ("out", out, "")]
    qemu: list[str | Path] = [
        "setpriv", "--pdeathsig", "KILL",  # it ends with this process, however that ends
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", PROCESSOR, "-smp", "1", "-m", str(MEMORY_MIB), "-nodefaults",
        "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio", "-net", "none",
        "-kernel", image.kernel, "-initrd", image.initramfs,
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check",
    ]  # fmt: skip
    for tag, path, more in shares:
        qemu += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none{more}"]
    with subprocess.Popen(qemu, stdin=subprocess.DEVNULL) as process:
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"machine: stopped after {LIMIT_S:g} s", flush=True)
        finally:
            process.kill()
    if not started.exists() and process.returncode > 0:
        raise Missing(f"qemu ends with status {process.returncode}; what it said is above")
    return int(status.read_text()) if status.exists() else 125


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="machine.py", description="Run a command in a machine that has RDMA.")
    parser.add_argument("--out", type=Path, help="what the command sees as /out")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="machine-") as folder:
        try:
            return run(given.command or ["ibv_devinfo"], given.out or Path(folder), kept())
        except Missing as error:
            print(f"SKIPPED: no emulated machine: {error}", file=sys.stderr)
            return UNAVAILABLE


def kept() -> dict[str, str]:
    """Of the environment here, what a command inside is to know."""
    found = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ}
    python = "python{}.{}".format(*sys.version_info)
    packages = ROOT / ".venvs" / "vllm" / "lib" / python / "site-packages"
    return found | ({TORCH: str(packages)} if (packages / "torch").is_dir() else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
