"""Has SGLang's own code for page hashes compiled before SGLang needs it.

SGLang hashes pages in C++, which it compiles with the first hash that it makes on a machine: 10 to 40 s in which a
lookup hangs, and in which a flush ends the scheduler, which waits 10 s for that lookup. Its loader lets one thread of
all processes compile at a time and the others take what came of it, so whoever needs a hash meanwhile waits for what
is left.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache

from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import get_logger
from mooncake_connector.threads import apart

_EXTENSION = "hicache_hash_cpp"

logger = get_logger(__name__)


@cache
def compile_early() -> Future[None]:
    """Begin in the background, once in a process; what is compiled already is loaded, which takes 0.1 s."""
    return apart(_compile)


@contained(nothing)
def _compile() -> None:
    try:
        from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
    except ImportError:  # other versions hash in Python
        return
    try:
        get_native_hash([0], None)
    except Exception as error:
        from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

        JIT_EXTENSION_VERSIONER.entries.pop(_EXTENSION, None)  # else torch takes it for compiled from now on
        said = "SGLang's code for page hashes cannot be compiled yet; SGLang tries again when it needs it: %r"
        logger.warning(said, error.__cause__ or error)
