"""What a rank hands over, as sections: the KV of each group of layers, or their states.

A model with one group has one section. Of several, each has a section of its own, with the group's block table: block
ids are shared by all groups, and so is the memory, of which a block is one group's at a time.

A state is one row of bytes, and each TP rank's is its own: heads of several kinds follow each other in it. So it goes
to the same rank of as many ranks, and instances of another number are refused.

An indexer's rows mean something in whole blocks alone. Instances whose blocks have as many tokens move whole blocks,
and others are refused (`Geometry.compatibility`).
"""

from __future__ import annotations

from math import gcd

from mooncake_connector.kv.page import BlockLayout, SegmentLayout
from transfer.plan.layout import LayoutError, RankLayout, Section
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.geometry import Group
from vllm_plugin.kv_memory import GroupMemory, KVMemory

_LARGEST_UNIT = 16
"""Bytes of a state that are moved as one element at most; nothing here knows what a number means."""


class RankSections:
    """See the module.

    Args:
        layout: the sections, group by group.
        layers: where a layer is, by vLLM's name: (number of its section, its number in there). Not those with states.
        positions: of the groups in `Geometry`, those of which this rank has a section.
    """

    def __init__(self, memory: KVMemory) -> None:
        is_hybrid = memory.geometry.is_hybrid
        parts = list(memory.groups.values())
        sections = [_section(part, _name(part.group) if is_hybrid else "kv") for part in parts]
        self.layout, self.positions, self.is_hybrid = RankLayout(tuple(sections)), tuple(memory.groups), is_hybrid
        self.layers = {
            name: (number, part.shard.layer_start + at)
            for number, part in enumerate(parts)
            for at, name in enumerate(part.group.layer_names)
            if name in memory.layers
        }
        last_layers = [(number, section.shard.layer_stop - 1) for number, section in enumerate(sections)]
        self.last_layers = [last for last in last_layers if not sections[last[0]].is_whole] or last_layers[:1]
        """Of each section whose KV is sent while the prompt is computed: (its number, its last layer). On a stage of
        the pipeline that has states alone, of one of these: nothing is sent of it, but its blocks have to be known."""


def _name(group: Group) -> str:
    """By which the other instance knows it. A state's bytes do not say of what they are, nor in which order."""
    shapes = getattr(group.spec, "shapes", ()) if group.kind == "state" else ()
    span = "" if group.span is None else f" of {group.span}"
    kind = "indexer" if group.in_whole_blocks else group.kind
    return " ".join([f"{group.index} {kind}{span}", *("x".join(map(str, shape)) for shape in shapes)])


def _section(part: GroupMemory, name: str) -> Section:
    group, blocks = part.group, part.blocks
    if group.kind == "state":
        return _state(part, name)
    assert isinstance(blocks, KVBlocks)
    return Section(
        name=name,
        model_layers=group.num_layers,
        model_heads=group.num_kv_heads,
        shard=part.shard,
        k_dim=group.k_dim,
        v_dim=group.v_dim,
        itemsize=group.itemsize,
        blocks=blocks.layout,
        is_windowed=group.span is not None,
    )


def _state(part: GroupMemory, name: str) -> Section:
    """Blocks of one row, of a layer's state: its bytes, whatever they are."""
    group, first = part.group, part.tensors[0]
    if len(part.tensors) != part.shard.num_layers:
        raise LayoutError(
            f"states of {part.shard.num_layers} layers lie in {len(part.tensors)} tensors; expected one a layer"
        )
    unit = gcd(group.k_dim, _LARGEST_UNIT)
    return Section(
        name=name,
        model_layers=group.num_layers,
        model_heads=group.num_kv_heads,
        shard=part.shard,
        k_dim=group.k_dim // unit,
        v_dim=0,
        itemsize=unit,
        blocks=BlockLayout(
            layer_addresses=tuple(tensor.data_ptr() for tensor in part.tensors),
            num_blocks=int(first.shape[0]),
            block_tokens=1,
            block_stride=first.stride(0) * first.element_size(),
            head_stride=group.k_dim,
            k=SegmentLayout(0, ((1, group.k_dim),), ((group.k_dim // unit, unit),)),
            v=None,
        ),
        is_whole=True,
    )
