"""Pages that come back to a pool from a copy: into free space, with their time of use, proven before they show."""

from store_client.embedded.pool import Pool
from store_client.embedded.put import PutPages
from store_client.embedded.putting import FillAll, placed


def put_back(pool: Pool, pages: PutPages, fill: FillAll, deadline: float) -> list[str]:
    """Returns for each page "stored", "present", or why it is neither. Raises LockTimeout; what `fill` raises passes.

    `fill` is that of `EmbeddedSpace.receive`. `pages.used_ns` must be given.
    """
    plan = pool.writer.reserve(pages, deadline)
    try:
        places = list(placed(pool, plan))
        checksums = fill([(place.index, pieces) for place, pieces in places])
        for (place, _), checksum in zip(places, checksums, strict=True):
            place.checksum = checksum
    except BaseException:
        if plan.reservation is not None:
            pool.writer.abandon(plan.reservation)
        raise
    outcome = plan.outcome | pool.writer.commit(plan, deadline)
    results = [outcome.get(i, "present") for i in range(len(pages.keys))]  # not said of a key that is there twice
    stored = results.count("stored")
    pool.counters.add(stored_pages=stored, stored_nbytes=stored * pages.nbytes)
    return results
