"""Sets a client up against a master and ends with status 0 if that went well: `python trial.py JSON`.

The library's `setup` holds the interpreter lock for as long as a master does not answer, and a client that was not
set up crashes the process. So this is tried in a process of its own first. It imports nothing of this project.
"""

import json
import os
import sys


def main() -> None:
    order = json.loads(sys.argv[1])
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = 1
    if store.setup(*order["arguments"], **order["options"]) == 0:
        status = 0 if store.is_exist(order["probe"]) >= 0 else 2
    sys.stderr.flush()
    os._exit(status)  # while the client is there: to put one away can hang, where masters are elected


if __name__ == "__main__":
    main()
