"""The built-in router in a process that `proxied` forks: CODE ARGUMENT..., where CODE runs first."""

import sys

from mooncake_connector.deploy import fleet, proxy

if __name__ == "__main__":
    fleet.HEALTH_EVERY_S = 0.2
    exec(sys.argv.pop(1))
    proxy.main()
