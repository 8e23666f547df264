"""The clock that page uses are noted by: nobody can set it, and it runs as long as a pool may live, from boot to boot.

Processes in another time namespace (rare: no container runtime makes one by default) may see it shifted; so a time that
lies ahead is possible, and means nothing but "lately".
"""

import time


def now_ns() -> int:
    """Nanoseconds since the machine was started, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
