"""Configuration: the one schema. Where values come from is in `mooncake_connector.config.sources`.

docs/configuration.md is generated from it by `mooncake_connector.config.docs`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake_connector.config.tiers import Tiers
from mooncake_connector.config.values import TRANSPORTS, Hosts, IpAddress, Nbytes, PageTokens, RdmaPorts, Transports


def _field(description: str, allowed: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"allowed": allowed}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be configured; the defaults work on one machine with nothing set."""

    pool: Annotated[
        Path | None,
        _field(
            "Folder of the pool. All engines that use the same folder share their pages. It must be a pool already, "
            "or empty, or not exist yet: then it is created with mode 0700. Unset: "
            "`/dev/shm/mooncake-connector-<uid>`; if shared memory is too small, the same name in the temporary "
            "folder, and a line in the log.",
            "an absolute path (`~` is expanded); null for the default",
        ),
    ] = None
    capacity: Annotated[
        Nbytes | None,
        _field(
            "How many bytes of pages the pool may hold; when it is full, pages are evicted (`eviction`). "
            "Unset: a quarter of what the folder's file system has free when the pool is created, or of what a "
            "container's memory limit leaves where that is less, at most 16 GiB.",
            'bytes as an integer, or text with a unit: "8GiB" or "8Gi" (8 * 1024**3), "8GB" or "8G" (8 * 1000**3), '
            "likewise with K, M, T and P, in upper or lower case; from 1MiB to 1024TiB; null for the default",
        ),
    ] = None
    page_tokens: Annotated[
        PageTokens,
        _field(
            "Tokens in a page. Only instances with the same value share pages. Smaller pages reuse more of a prefix; "
            "larger ones are cheaper to look up and copy. In vLLM, where it is unset and a model with several KV-cache "
            "groups has larger blocks that are no multiple of 64 (544 tokens, say), a page has the largest size from "
            "16 to 64 that divides them, and the log says which; with a size that divides none of them hits could end "
            "at multiples of both only.",
            "a power of two from 16 to 1024",
        ),
    ] = PageTokens(64)
    model_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\S")] | None,
        _field(
            "Identifies the model instead of the content of its files. Set it where the weights cannot be read from "
            "local files, and change it whenever the weights change: instances with the same `model_id` share pages.",
            "text of 1 to 256 characters that are not all blank; null to hash the model's files",
        ),
    ] = None
    min_hit_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        _field(
            "Shorter hits are computed instead of loaded. Unset: one page (`page_tokens`).",
            "an integer from 1 to 1048576; null for one page",
        ),
    ] = None
    lookup_wait_s: Annotated[
        float,
        _field(
            "While the pool does not know yet whether it will have more of a prompt, the request waits, for at most so "
            "many seconds in all; then what is there is loaded and the rest is computed. The pool of this host always "
            "knows at once.",
            "a number from 0 to 60; 0 to never wait",
            ge=0,
            le=60,
        ),
    ] = 1.0
    load_deadline_s: Annotated[
        float,
        _field(
            "A load that gets no further for this many seconds, or takes ten times as long in all, is given up, and "
            "the rest of its tokens are computed.",
            "a number above 0, at most 600",
            gt=0,
            le=600,
        ),
    ] = 5.0
    save_deadline_s: Annotated[
        float,
        _field(
            "A save that takes longer than this many seconds is given up; pages not saved by then are not stored.",
            "a number above 0, at most 600",
            gt=0,
            le=600,
        ),
    ] = 10.0
    device_slab: Annotated[
        Nbytes,
        _field(
            "Memory that each worker of vLLM takes of its GPU beside the KV cache, for pages on their way between the "
            "two and the pool, and a sixteenth more for checksums; more where four pages need more. Half is for loads, "
            "half for saves.",
            'as for `capacity`, without null: "128MiB"',
        ),
    ] = Nbytes(128 << 20)
    eviction: Annotated[
        Literal["lru", "s3-fifo", "auto"] | None,
        _field(
            "Which pages are evicted first when a new pool is full. A pool that is there keeps its own policy, the "
            "same for all its processes: `mooncake-connector store eviction` shows and changes it. A page is never "
            "evicted before the pages that follow it in its prefix.",
            '"lru" (least recently used), "s3-fifo" (what was used once goes before what was used again) or "auto" '
            "(what by the pool's own record comes back last); null for the default, lru",
        ),
    ] = None
    state_budget: Annotated[
        float,
        _field(
            "For models that keep a state (Mamba, GDN, KDA) beside full attention: how many bytes of states a prompt "
            "may have in the pool for each byte of its pages. vLLM makes a state reusable at the end of a prompt, "
            "where prompts part, and every `--prefix-cache-retention-interval` tokens; one is stored where it is at "
            "least so far behind the last one that this holds. Every hit goes on from a state: with a smaller budget "
            "the pool holds more prompts, and short ones are no hits.",
            "a number above 0, at most 1024",
            gt=0,
            le=1024,
        ),
    ] = 4.0
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        _field("Messages of this package below this level are not logged.", '"DEBUG", "INFO", "WARNING" or "ERROR"'),
    ] = "INFO"
    log_requests: Annotated[
        bool,
        _field(
            "Whether each request gets one line in the log, at the level INFO: how many of its tokens came from where, "
            "how long that took, and why the first page was missing "
            "([troubleshooting](troubleshooting.md#one-line-for-each-request)). The last few hundred are also kept "
            "in the pool, in 2 MiB, for `mooncake-connector why --request`.",
            "true or false",
        ),
    ] = False
    sglang_takeover: Annotated[
        bool,
        _field(
            "Makes SGLang's `--hicache-storage-backend mooncake` use this package, for set-ups whose launch command "
            "cannot be changed. It is read before SGLang's options, so set it in the environment (`1`) or in the file.",
            "true or false",
        ),
    ] = False
    prefix_reuse: Annotated[
        bool,
        _field(
            "Whether pages are read from the pool and written to it. `false` leaves only transfers between prefill and "
            "decode instances.",
            "true or false",
        ),
    ] = True
    tiers: Annotated[
        Tiers,
        _field(
            "What lies behind the pool of this host, nearest first: a Mooncake Store cluster (`mooncake`), a disk of "
            "this host (`disk`), a folder that several hosts mount (`folder`), an object store (`object`). Pages that "
            "the pool lacks are fetched from them, and new pages are written to them, by one agent process for each "
            "pool. Unset: there is no agent, but for `agent_http_port`. See [a fleet](fleet.md).",
            'a list of up to 8 tiers: each a mapping with `kind` ("mooncake", "disk", "folder" or "object") and the '
            "settings of that kind, or the name of the kind alone; in the environment as JSON",
        ),
    ] = Tiers()
    agent: Annotated[
        Literal["auto", "external", "embedded"],
        _field(
            "Who runs the agent where `tiers` are set. `auto`: the first engine starts it, as a process of its own "
            "that outlives the engine. `external`: it is started apart, by hand, by systemd or in a container of its "
            "own. `embedded`: a thread of one of the engine's processes.",
            '"auto", "external" or "embedded"',
        ),
    ] = "auto"
    agent_idle_s: Annotated[
        float,
        _field(
            "An agent that an engine started ends when nobody has used the pool for so many seconds.",
            "a number from 1 to 86400",
            ge=1,
            le=86400,
        ),
    ] = 300.0
    agent_metrics_port: Annotated[
        int,
        _field(
            "Port on 127.0.0.1 at which the agent serves the metrics of this host to Prometheus.",
            "an integer from 0 to 65535; 0 for none",
            ge=0,
            le=65535,
        ),
    ] = 0
    agent_http_port: Annotated[
        int,
        _field(
            "Port at which the agent answers routers that ask who has which pages. Also where there are no `tiers`: "
            "then it is what the agent is for. See [the index](index.md).",
            "an integer from 0 to 65535; 0 for none",
            ge=0,
            le=65535,
        ),
    ] = 0
    agent_http_host: Annotated[
        IpAddress,
        _field(
            "Address of this machine at which it does. Any but the loopback's needs `agent_http_token_file`.",
            "a literal IP address; 0.0.0.0 or :: for all of this machine's",
        ),
    ] = IpAddress("127.0.0.1")
    agent_http_token_file: Annotated[
        Path | None,
        _field(
            "File with the token that whoever asks there must send (`Authorization: Bearer TOKEN`): at least 16 bytes, "
            "not counting white space at either end. It must belong to this user or root, and only its owner may read "
            "it.",
            "an absolute path (`~` is expanded); null for none, which leaves the loopback alone",
        ),
    ] = None
    transports: Annotated[
        Transports,
        _field(
            "How KV may travel between instances, tried in this order for each peer. From GPU to GPU: `cuda_ipc` (same "
            "host, same user). For KV on GPUs and in host memory: `shm` goes through shared memory (same host, same "
            "user), `tcp` reaches any host, `rdma` any host with RDMA cards where it is named here. For KV in host "
            "memory: `cma` reads the other process's memory (same host, same user, needs permission to trace). "
            "`nixl` and `mooncake` reach any host over libraries that must be installed, with KV of both kinds, and "
            "are loaded where they are named here. `auto` stands for the default and, where a port of an RDMA card is "
            "up and no `tls_certificate` is set, for `rdma` before `tcp`: see "
            "[which one when](transfer.md#which-one-when).",
            'a list of names, such as "cuda_ipc", "cma", "shm" and "tcp", each at most once, at least one',
        ),
    ] = Transports(TRANSPORTS)
    transfer_hosts: Annotated[
        Hosts,
        _field(
            "IP addresses of this machine at which instances on other hosts, or in other containers, reach it over "
            "TCP: the first for control connections, all of them for data. Needs `secret_file`. Unset: instances talk "
            "over Unix sockets with those of the same user on the same host, and no port is opened.",
            "a list of up to 16 different literal IP addresses; no names, no 0.0.0.0, no :: and no multicast, since "
            "peers connect to them",
        ),
    ] = Hosts()
    transfer_port: Annotated[
        int,
        _field(
            "Port at which decode instances look up the ranks of this prefill instance; without `transfer_hosts`, the "
            "number in the name of its Unix socket. Set it if the proxy sends requests to both instances at once: it "
            "must know the port then.",
            "an integer from 0 to 65535; 0 for any that is free",
            ge=0,
            le=65535,
        ),
    ] = 0
    secret_file: Annotated[
        Path | None,
        _field(
            "File with the secret that all instances of a deployment share: at least 16 bytes, not counting white "
            "space at either end. It must belong to this user or root, and only its owner may read it.",
            "an absolute path (`~` is expanded); null for none, which keeps transfers on this machine",
        ),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        _field(
            "Certificate of this instance, in PEM. With `tls_key` and `tls_authority`, everything sent over TCP is "
            "encrypted, and both sides show a certificate.",
            "an absolute path (`~` is expanded); null for no TLS",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        _field("Private key of `tls_certificate`, in PEM.", "an absolute path (`~` is expanded); null for no TLS"),
    ] = None
    tls_authority: Annotated[
        Path | None,
        _field(
            "Certificates of the authority that signs the peers' certificates, in PEM.",
            "an absolute path (`~` is expanded); null for no TLS",
        ),
    ] = None
    rdma_ports: Annotated[
        RdmaPorts,
        _field(
            "Ports of RDMA cards over which the transport `rdma` goes, all together. Unset: those that are up, of one "
            "kind of link, at least half as fast as the fastest, and nearest to the processors that the process may "
            "use (NUMA); those that have an address of `transfer_hosts` come first. See "
            "[several rails](transfer.md#several-rails).",
            'a list of up to 8 different names, each a card\'s in /sys/class/infiniband ("mlx5_0"), or with a port '
            '("mlx5_0:2")',
        ),
    ] = RdmaPorts()
    rdma_gid_index: Annotated[
        Annotated[int, Meta(ge=0, le=255)] | None,
        _field(
            "Entry of each port's table of addresses (GIDs) by which peers reach it. Unset: one for RoCE v2 that is an "
            "address of `transfer_hosts`, else any IPv4 address, else IPv6; of InfiniBand the first.",
            "an integer from 0 to 255; null for the one that serves best",
        ),
    ] = None
    rdma_traffic_class: Annotated[
        int,
        _field(
            "Traffic class of what the transport `rdma` sends: with RoCE the byte with DSCP in its upper six bits, by "
            "which switches choose the lossless queue (104 for DSCP 26). Set it at both sides.",
            "an integer from 0 to 255", ge=0, le=255,
        ),
    ] = 0  # fmt: skip
    rdma_service_level: Annotated[
        int,
        _field(
            "InfiniBand's service level of what the transport `rdma` sends. Set it at both sides.",
            "an integer from 0 to 15", ge=0, le=15,
        ),
    ] = 0  # fmt: skip
    rdma_pkey_index: Annotated[
        int,
        _field(
            "Entry of each port's table of partition keys that the transport `rdma` uses.",
            "an integer from 0 to 65535", ge=0, le=65535,
        ),
    ] = 0  # fmt: skip
    rdma_retries: Annotated[
        int,
        _field(
            "How often a card says again what the peer's does not acknowledge, before the rail counts as broken.",
            "an integer from 1 to 7", ge=1, le=7,
        ),
    ] = 7  # fmt: skip
    rdma_lost_after_s: Annotated[
        float,
        _field(
            "What a card is not told of for about so many seconds, at least half of it, all `rdma_retries` included, "
            "counts as lost: what was under way goes over another rail.",
            "a number from 0.01 to 60", ge=0.01, le=60,
        ),
    ] = 5.0  # fmt: skip
    rdma_gpudirect: Annotated[
        Literal["auto", "off"],
        _field(
            "Whether the transport `rdma` lets cards read and fill KV in GPU memory by themselves. `auto`: where the "
            "driver and each card in use take it (dma-buf, else nvidia_peermem) and vLLM's sleep mode is off; what is "
            "not taken goes through page-locked stages, and a line of the log says why. `off`: all goes through them.",
            '"auto" or "off"',
        ),
    ] = "auto"
    rdma_windows: Annotated[
        Literal["auto", "off"],
        _field(
            "By which keys cards of peers read KV in host memory. `auto`: by keys of memory windows, which end with "
            "each order, where a card has such (type 2B). `off`: by keys of all registered memory, which last.",
            '"auto" or "off"',
        ),
    ] = "auto"
    granularity: Annotated[
        Literal["auto", "full", "chunk", "layer"],
        _field(
            "When KV is sent: once the whole prompt is computed (`full`), after each chunk of prefill (`chunk`), or "
            "after each layer of a chunk (`layer`). `auto` decides by the length of the prompt.",
            '"auto", "full", "chunk" or "layer"',
        ),
    ] = "auto"
    granularity_chunk_tokens: Annotated[
        int,
        _field(
            "With `auto`, shorter prompts are sent as a whole.",
            "an integer from 0 to 1073741824, at most `granularity_layer_tokens`",
            ge=0,
            le=1 << 30,
        ),
    ] = 512
    granularity_layer_tokens: Annotated[
        int,
        _field(
            "With `auto`, longer prompts are sent layer by layer.",
            "an integer from 0 to 1073741824, at least `granularity_chunk_tokens`",
            ge=0,
            le=1 << 30,
        ),
    ] = 4096
    transfer_deadline_s: Annotated[
        float,
        _field(
            "The decode instance gives up a transfer of which nothing arrives for this many seconds once it has "
            "blocks. While the prefill instance says that the request queues or is computed there, it waits for 300 s.",
            "a number above 0, at most 3600",
            gt=0,
            le=3600,
        ),
    ] = 120.0
    transfer_lease_s: Annotated[
        float,
        _field(
            "A peer that has not answered for this many seconds is given up. The prefill instance keeps the KV of a "
            "prompt that nobody fetches for the same time. Values below 5 must be the same on both sides.",
            "a number from 1 to 3600",
            ge=1,
            le=3600,
        ),
    ] = 30.0
    transfer_failure: Annotated[
        Literal["recompute", "fail"],
        _field(
            "What happens when a load or a transfer fails: the prompt is computed (`recompute`), or the request fails "
            "(`fail`).",
            '"recompute" or "fail"',
        ),
    ] = "recompute"

    @property
    def effective_min_hit_tokens(self) -> int:
        """`min_hit_tokens`, or one page where it is not set."""
        return self.page_tokens if self.min_hit_tokens is None else self.min_hit_tokens
