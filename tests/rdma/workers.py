"""Workers of the connector with KV in tensors of torch, in a process without an engine.

Of vLLM `vllm_plugin` needs a few names for them, which are stood in for; all else is real. The processor of the
emulated machine is too slow for vLLM's imports, and has not what its kernels are compiled for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from simulated.waiting import wait_for

from mooncake_connector.config.schema import Config
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Directory
from transfer.control.handshake import Identity
from transfer.plan.layout import Table
from transfer.protocol.incoming import Where
from transfer.serving import Computed

if TYPE_CHECKING:
    import torch

    from vllm_plugin.messages import Ended

LAYERS, HEADS, DIM = 3, 4, 16
BLOCKS, BLOCK_TOKENS = 6, 16
TOKENS = 44
CHUNKS = (20, TOKENS)
NAMES = tuple(f"model.layers.{number}.self_attn.attn" for number in range(LAYERS))
SECRET = b"sixteen bytes or more"


def stand_in_for_vllm() -> None:
    """What the workers' modules import of it."""

    @dataclass
    class Stats:
        data: dict[str, Any] = field(default_factory=dict)

    connector = "vllm.distributed.kv_transfer.kv_connector"
    base, metrics = f"{connector}.v1.base", f"{connector}.v1.metrics"
    modules: dict[str, dict[str, Any]] = {
        base: {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object},
        metrics: {"KVConnectorStats": Stats, "KVConnectorPromMetrics": object},
        "vllm.distributed.utils": {"get_pp_indices": None},
        "vllm.config": {"VllmConfig": object},
        "vllm.platforms": {"current_platform": None},
        "vllm.v1.kv_cache_interface": {"MambaSpec": object},
    }
    for name, names in modules.items():
        parents = name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            sys.modules.setdefault(".".join(parents[:depth]), ModuleType(".".join(parents[:depth])))
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(names)


class Instance:
    """The workers of all TP ranks, their tensors, and their directory."""

    def __init__(self, tp_size: int, table: list[int], transports: Sequence[str]) -> None:
        import torch

        from vllm_plugin import kv_memory
        from vllm_plugin.geometry import Geometry, Group
        from vllm_plugin.pd.worker import open_worker
        from vllm_plugin.stats import ConnectorStats

        self.table = table
        config = Config(
            transports=list(transports), transfer_hosts=[THIS_HOST], prefix_reuse=False, page_tokens=BLOCK_TOKENS,
            granularity="layer", rdma_lost_after_s=10.0,
        )  # fmt: skip
        group = Group(
            num_layers=LAYERS, num_kv_heads=HEADS, k_dim=DIM, v_dim=DIM, itemsize=2, kv_dtype="bfloat16", is_mla=False,
            block_tokens=BLOCK_TOKENS, layer_names=NAMES, tp_size=tp_size, pp_size=1,
        )  # fmt: skip
        shape = BLOCKS, HEADS // tp_size, BLOCK_TOKENS, 2 * DIM
        self.ranks: list[dict[str, torch.Tensor]] = []
        self.stats: list[Any] = []
        self.workers: list[Any] = []
        kv_memory.probe_cpu_order = lambda *_: None  # type: ignore[assignment]  # K beside V, as on devices
        for rank in range(tp_size):
            engine: Any = SimpleNamespace(
                parallel_config=SimpleNamespace(rank=rank, use_ubatching=False),
                cache_config=SimpleNamespace(cache_dtype="auto"),
                model_config=SimpleNamespace(dtype=torch.bfloat16, enable_sleep_mode=False),
            )
            memory = kv_memory.KVMemory(engine, Geometry((group,), tp_size, 1), config, BLOCKS)
            self.ranks.append({name: torch.zeros(shape, dtype=torch.bfloat16) for name in NAMES})
            memory.register(self.ranks[-1])
            self.stats.append(ConnectorStats({}))
            self.workers.append(open_worker(memory, config, Access(Identity(SECRET)), self.stats[-1]))
        cards = [worker._node.card for worker in self.workers]
        self.directory = Directory("engine", cards, tp_size, (THIS_HOST, 0), Access(Identity(SECRET)))

    @property
    def where(self) -> Where:
        return Where(THIS_HOST, self.directory.port, "engine")

    def tokens(self, layer: str) -> torch.Tensor:
        """Of the request, `[token, head, content]`, heads of all ranks."""
        import torch

        heads = torch.cat([tensors[layer] for tensors in self.ranks], dim=1)
        return heads[self.table].transpose(1, 2).flatten(0, 1)[:TOKENS]

    def step(self, **said: Any) -> Any:
        from vllm_plugin.messages import PDStep, StepMetadata

        return StepMetadata(pd=PDStep(**said))

    def start(self, **said: Any) -> None:
        for worker in self.workers:
            worker.start(self.step(**said))

    def prefill(self, name: str) -> None:
        """Compute all of a request, chunk by chunk and layer by layer."""
        import torch

        for worker in self.workers:
            worker.before_step(self.step(opened={name: name}))
        first = 0
        for stop in CHUNKS:
            step = self.step(computed={name: (Computed([self.table], stop), TOKENS)})
            for worker in self.workers:
                worker.before_step(step)
            for layer in NAMES:
                for worker, tensors in zip(self.workers, self.ranks, strict=True):
                    for token in range(first, stop):
                        row = tensors[layer][self.table[token // BLOCK_TOKENS], :, token % BLOCK_TOKENS]
                        row.copy_(torch.randn(row.shape))
                    worker.layer_computed(layer)
            for worker in self.workers:
                worker.step_computed(step)
            first = stop
        self.start(finished={name: TOKENS})

    def fetch(self, name: str, prefill: Instance) -> None:
        from vllm_plugin.messages import Announcement

        announced = {name: Announcement(name, prefill.where, computed=False)}
        self.start(announced=announced, granted={name: [Table(0, TOKENS, self.table)]}, home=self.where.address)

    def ended(self, is_over: Callable[[Ended], bool]) -> list[Ended]:
        """What each worker reports, once that `is_over`."""
        from vllm_plugin.messages import Ended

        reports = []
        for worker in self.workers:
            ended = Ended()
            wait_for(lambda: worker.take_ended(ended) or is_over(ended))  # noqa: B023
            reports.append(ended)
        return reports

    def carried_by(self) -> set[str]:
        return {name for stats in self.stats for name in stats.data.get("transports", {})}

    def close(self) -> None:
        self.directory.close()
        for worker in self.workers:
            worker.stop("the test is over")
