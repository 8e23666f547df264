"""A prefill instance in a process of its own, to be killed or stopped: `python -m simulated.prefill_process PORT`.

It computes each transfer that is named on its standard input, one a line, slowly; endings are printed, one a line.
"""

from __future__ import annotations

import sys
import threading
import time

from simulated.nodes import Instances
from simulated.pair import P_TABLE

from transfer.plan.granularity import Bounds, Granularity
from transfer.protocol.orders import Timing
from transfer.session import NodeOptions


def main(port: str, lease_s: str, step_s: str) -> None:
    options = NodeOptions(
        page_tokens=16,
        bounds=Bounds(fixed=Granularity.LAYER),
        timing=Timing(lease_s=float(lease_s), heartbeat_s=float(lease_s) / 6),
    )
    instance = Instances(1, P_TABLE, engine_id=f"life-{time.time_ns()}", options=options, port=int(port))
    instance.fill()
    print(instance.where.port, instance.engine_id, flush=True)
    threading.Thread(target=report, args=(instance,), daemon=True).start()
    for line in sys.stdin:
        name = line.strip()
        instance.open(name)
        instance.compute(name, step_s=float(step_s))
        instance.finish(name)
        print("computed", name, flush=True)


def report(instance: Instances) -> None:
    while True:
        for rank in instance.ranks:
            for ended in rank.node.take_sent():
                print("sent", ended.name, ended.ending.value, flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
