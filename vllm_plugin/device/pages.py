"""The pages of one group of layers on a device: begun here, moved by its pipes (`pipe`).

As `KVBlocks`, which does it page by page through host memory: what a kernel cannot do is left to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat, fit
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes
from vllm_plugin.blocks import BlockCopies, KVBlocks
from vllm_plugin.device.permutation import Permutation, runs
from vllm_plugin.device.pipe import Permuter, Pipe

logger = get_logger(__name__)

Prepare = Callable[[Permutation, int, bool], Permuter]
"""Called with (permutation, size of a page, whether it goes into the blocks)."""


class DevicePages:
    """See the module.

    Args:
        fmt: of the pages of this rank's `shard`.
        loads, saves: the pipes into blocks and out of them. What is begun here is over when they are settled.
    """

    def __init__(
        self, blocks: KVBlocks, shard: Shard, fmt: PageFormat, loads: Pipe, saves: Pipe, prepare: Prepare
    ) -> None:
        self._blocks, self._shard, self._fmt = blocks, shard, fmt
        self._loads, self._saves, self._prepare = loads, saves, prepare
        self._parts: dict[Shard, tuple[PageFormat, Permuter | None]] = {}
        self._copied: WeakKeyDictionary[BlockCopies, Permuter] = WeakKeyDictionary()
        """Pages of the same copies go in one launch."""
        self._moved: list[bool] = []
        """Of the pages that were loaded since all was settled last, whether by the device."""
        self._out = prepare(Permutation.of(fmt, blocks.layout), fmt.nbytes, False)
        copied = Permutation.of(fmt, blocks.copy([0]).layout)
        prepare(copied, fmt.nbytes, False)  # compiled now, not when a block is given away
        self._parts[shard] = fmt, prepare(Permutation.of(fmt, blocks.layout), fmt.nbytes, True)

    def load_page(self, part: Shard, block_ids: Sequence[int], first_token: int, page: Bytes, skip_tokens: int) -> None:
        """Begin what `KVBlocks.load_page` does."""
        fmt, permuter = self._part(part)
        of_page = runs(fmt, self._blocks.layout, block_ids, first_token, skip_tokens)
        if permuter is not None and of_page.blocks and self._loads.can_move(permuter):
            self._moved.append(True)
            self._loads.begin(page, permuter, of_page)
        else:
            self._moved.append(False)
            self._blocks.load_page(part, block_ids, first_token, page, skip_tokens)

    def settle_loads(self) -> list[int | None]:
        """As `Settle`."""
        moved, self._moved = self._moved, []
        digests = iter(self._loads.settle())
        return [next(digests, None) if one else None for one in moved]

    def save_page(self, block_ids: Sequence[int], first_token: int, page: Bytes) -> int:
        """Begin what `KVBlocks.save_page` does. Returns what `saved` will be at least once the page is saved."""
        return self._saves.begin(page, self._out, runs(self._fmt, self._blocks.layout, block_ids, first_token, 0))

    def save_copied(self, copies: BlockCopies, block_ids: Sequence[int], first_token: int, page: Bytes) -> int:
        """Begin what `BlockCopies.save_page` does; the copies have to stay until then. Returns as `save_page`."""
        layout, rows, first_token = copies.found(block_ids, first_token)
        if copies not in self._copied:
            self._copied[copies] = self._prepare(Permutation.of(self._fmt, layout), self._fmt.nbytes, False)
        return self._saves.begin(page, self._copied[copies], runs(self._fmt, layout, rows, first_token, 0))

    @property
    def saved(self) -> int:
        """So many of the pages that were begun, from the first ever on, are saved, as far as is known."""
        return self._saves.through

    @property
    def settled(self) -> int:
        """So many of them are settled."""
        return self._saves.settled

    def settle_saves(self, turn: int | None = None) -> list[int | None]:
        """As `Settle`, of all pages that were begun and are not settled yet, or of those up to this turn."""
        return self._saves.settle(turn)

    @property
    def closed(self) -> bool:
        """Whether nothing is moved here any more, since the engine took its memory away."""
        return self._saves.closed

    def _part(self, part: Shard) -> tuple[PageFormat, Permuter | None]:
        """Pages of another shard, and how they get into the blocks; None where no kernel is to be had for them."""
        known = self._parts.get(part)
        if known is None:
            fmt, common = fit(self._fmt, self._shard, part)
            permuter = None
            try:
                permuter = self._prepare(Permutation.of(fmt, self._blocks.layout, common), fmt.nbytes, True)
            except Exception as error:  # Triton has a compiler, a cache and tools of its own
                said = "pages of another shard are copied by way of host memory, without a kernel: %s"
                log_once("vllm.device.part", said, error, logger=logger, exc_info=True)
            known = self._parts[part] = fmt, permuter
        return known
