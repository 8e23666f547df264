"""Which ports are used together, as the kernel describes them, and which of them serves which of a peer's."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from transfer.transports.rdma.rails import (
    INFINIBAND,
    ROCE_V1,
    ROCE_V2,
    Rail,
    chosen,
    distances,
    index_now,
    is_up,
    links_to,
    matched,
    rails,
)


@pytest.fixture
def sysfs(tmp_path):
    """Makes a port of a card as the kernel shows it."""

    def make(device, number, state, link, entries, node=None, rate="100 Gb/sec (4X EDR)"):
        port = tmp_path / device / "ports" / str(number)
        for folder in ("gids", "gid_attrs/types"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
        (port / "rate").write_text(f"{rate}\n")
        if node is not None:
            (tmp_path / device / "device").mkdir(exist_ok=True)
            (tmp_path / device / "device" / "numa_node").write_text(f"{node}\n")
        for index, (address, kind) in enumerate(entries):
            (port / "gids" / str(index)).write_text(f"{address}\n")
            if kind:
                (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        return tmp_path

    return make


LOCAL, IP4, IP6 = (
    f"fe80:{'0000:' * 6}0001", f"{'0000:' * 5}ffff:0a4d:0001", f"fd00:{'0000:' * 6}0007",
)  # fmt: skip
NONE = ":".join(["0000"] * 8)


def one_of(found, host, **options):
    return next(iter(chosen(found, [host], **options)), None)


def test_of_a_card_for_ethernet_the_address_that_peers_know_is_taken(sysfs):
    entries = [(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (IP4, "IB/RoCE v1"), (IP4, "RoCE v2"), (IP6, "RoCE v2")]
    entries.append((NONE, ""))
    found = rails(sysfs("card1", 1, "4: ACTIVE", "Ethernet", entries))
    assert [(rail.gid_index, rail.kind, rail.address) for rail in found] == [
        (0, ROCE_V1, "fe80::1"), (1, ROCE_V2, "fe80::1"), (2, ROCE_V1, "10.77.0.1"), (3, ROCE_V2, "10.77.0.1"),
        (4, ROCE_V2, "fd00::7"),
    ]  # fmt: skip
    assert one_of(found, "10.77.0.1") == found[3] and one_of(found, "fd00::7") == found[4]
    assert one_of(found, "127.0.0.1") == found[3], "an IPv4 address before others, a link's own address last"
    assert one_of(found[:2], "127.0.0.1") == found[1] and one_of(found[:1], "127.0.0.1") is None
    assert one_of(found, "10.77.0.1", gid_index=1) == found[1] and one_of(found, "10.77.0.1", gid_index=2) is None
    assert chosen(found, ["10.77.0.1", "fd00::7"]) == [found[3]], "a port is used once, whatever addresses it has"


def test_ports_that_are_down_are_not_used_and_those_with_our_addresses_come_first(sysfs):
    sysfs("card0", 1, "1: DOWN", "Ethernet", [(IP4, "RoCE v2")])
    sysfs("card1", 1, "4: ACTIVE", "InfiniBand", [(LOCAL, ""), (IP6, "")])
    sysfs("card1", 2, "4: ACTIVE", "InfiniBand", [(IP6, "")])
    found = rails(sysfs("card2", 1, "4: ACTIVE", "Ethernet", [(IP4, "RoCE v2")]))
    by_name = {rail.name: rail for rail in found}
    assert len(found) == 4 and by_name["card1:1"].kind == INFINIBAND
    assert chosen(found, ["10.77.0.1"]) == [by_name["card2:1"]], "of one kind"
    assert chosen(found, ["127.0.0.1"]) == [by_name["card1:1"], by_name["card1:2"]]
    assert chosen(found, ["fd00::7", "10.77.0.1"]) == [by_name["card1:2"], by_name["card2:1"], by_name["card1:1"]]
    assert chosen(found, ["10.77.0.1"], ["card0"]) == []
    assert chosen(found, ["10.77.0.1"], ["card1"]) == [by_name["card1:1"], by_name["card1:2"]]
    assert chosen(found, ["10.77.0.1"], ["card1:2", "card2"]) == [by_name["card1:2"], by_name["card2:1"]]


def rail(name, host, node=-1, gbit_per_s=100.0):
    packed = ip_address(host).packed
    gid = packed if len(packed) == 16 else bytes(10) + b"\xff\xff" + packed
    return Rail(name, 1, True, ROCE_V2, gid, 1, node, gbit_per_s)


def test_cards_at_the_processors_of_this_process_are_used_and_others_only_where_there_are_none():
    near, also, far = rail("a", "10.0.0.1", 1), rail("b", "10.0.1.1", 1), rail("c", "10.0.2.1", 0)
    unknown = rail("d", "10.0.3.1")
    away = {0: 32, 1: 10}
    assert chosen([far, near, also], ["127.0.0.1"], distances=away) == [near, also]
    assert chosen([far, near, unknown], ["127.0.0.1"], distances=away) == [unknown, near]
    assert chosen([far], ["127.0.0.1"], distances=away) == [far]
    assert chosen([far, near], ["10.0.2.1"], distances=away) == [far, near], "its address was configured"
    assert chosen([far, near], ["127.0.0.1"], ["c", "a"], distances=away) == [far, near], "so was its name"
    assert chosen([far, near], ["127.0.0.1"], distances={0: 10, 1: 10}) == [near, far]


def test_cards_much_slower_than_others_are_left_out():
    fast, half, slow = rail("a", "10.0.0.1"), rail("b", "10.0.1.1", -1, 50.0), rail("c", "10.0.2.1", -1, 25.0)
    assert chosen([fast, half, slow], ["127.0.0.1"]) == [fast, half]
    assert chosen([slow, half], ["127.0.0.1"]) == [half, slow]


def test_of_a_device_the_cards_with_the_fewest_links_to_it_are_used_alone():
    beside, also, far = rail("a", "10.0.0.1", 0), rail("b", "10.0.1.1", 0), rail("c", "10.0.2.1", 0)
    other, slow = rail("d", "10.0.3.1", 1), rail("e", "10.0.4.1", 0, 25.0)
    links, found = {"a": 4, "b": 4, "c": 6, "e": 2}, [other, far, also, slow, beside]
    away = {0: 10, 1: 32}
    assert chosen(found, ["127.0.0.1"], distances=away, links=links) == [beside, also]
    assert chosen(found, ["10.0.2.1"], distances=away, links=links) == [beside, also], "it is the others' as well"
    assert chosen(found, ["127.0.0.1"], ["c"], distances=away, links=links) == [far], "its name was configured"
    assert chosen(found, ["127.0.0.1"], distances=away, links={"none of them": 2}) == [beside, also, far]
    assert chosen([other], ["127.0.0.1"], distances=away, links=links) == [other]
    assert chosen([], ["127.0.0.1"], links=links) == []


def test_links_to_a_device_are_counted_in_the_tree_of_the_kernel(tmp_path):
    """A switch with two devices behind the first root port, one behind another, and one of another host bridge."""
    tree, pci, cards = (tmp_path / name for name in ("devices", "bus", "infiniband"))
    switch = tree / "pci0000:16" / "0000:16:01.0" / "0000:17:00.0"
    places = {
        "beside": switch / "0000:18:01.0" / "0000:1a:00.0",
        "further": tree / "pci0000:16" / "0000:16:02.0" / "0000:30:00.0",
        "other": tree / "pci0000:80" / "0000:80:01.0" / "0000:81:00.0",
        "virtual": tree / "virtual" / "rxe",
    }
    gpu = switch / "0000:18:00.0" / "0000:19:00.0"
    for place in (gpu, *places.values()):
        place.mkdir(parents=True)
    pci.mkdir()
    (pci / "0000:19:00.0").symlink_to(gpu)
    for name, place in places.items():
        (cards / name).mkdir(parents=True)
        (cards / name / "device").symlink_to(place)
    assert links_to("0000:19:00.0", cards, pci) == {"beside": 4, "further": 6}
    assert links_to("0000:ff:00.0", cards, pci) == {}
    assert links_to("0000:19:00.0", tmp_path / "no cards", pci) == {}


def test_speed_and_place_are_what_the_kernel_says_of_them(sysfs):
    (found,) = rails(sysfs("card0", 1, "4: ACTIVE", "Ethernet", [(IP4, "RoCE v2")], 1, "2.5 Gb/sec (1X SDR)"))
    assert (found.node, found.gbit_per_s, found.name) == (1, 2.5, "card0:1")


def test_distances_are_those_from_the_nearest_of_our_processors(tmp_path, monkeypatch):
    for number, (processors, distance) in enumerate([("0-3,8", "10 21 31"), ("4-7", "21 10 15"), ("", "31 15 10")]):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{processors}\n")
        (node / "distance").write_text(f"{distance}\n")
    (tmp_path / "possible").write_text("0-2\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {8})
    assert distances(tmp_path) == {0: 10, 1: 21, 2: 31}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    assert distances(tmp_path) == {0: 10, 1: 10, 2: 15}
    assert distances(tmp_path / "missing") == {}


def test_a_port_is_looked_at_again_and_found_by_its_address_where_that_has_moved(sysfs, tmp_path):
    (found,) = rails(sysfs("card0", 1, "4: ACTIVE", "Ethernet", [(IP4, "RoCE v2")]))
    port = tmp_path / "card0" / "ports" / "1"
    assert is_up(found, tmp_path) and index_now(found, tmp_path) == 0
    (port / "state").write_text("1: DOWN\n")
    (port / "gids" / "0").write_text(f"{LOCAL}\n")
    assert not is_up(found, tmp_path)
    with pytest.raises(OSError, match=r"card0 port 1 has lost its address 10\.77\.0\.1"):
        index_now(found, tmp_path)
    (port / "gids" / "5").write_text(f"{IP4}\n")
    (port / "gid_attrs" / "types" / "5").write_text("RoCE v2\n")
    assert index_now(found, tmp_path) == 5


def test_without_a_card_there_are_no_rails(tmp_path):
    assert rails(tmp_path) == rails(tmp_path / "missing") == []
    assert chosen([], ["127.0.0.1"]) == []


@pytest.mark.parametrize(
    "ours, theirs, serving",
    [
        (["10.0.0.1", "10.0.1.1"], ["10.0.0.2", "10.0.1.2"], [0, 1]),
        (["10.0.1.1", "10.0.0.1"], ["10.0.0.2", "10.0.1.2"], [1, 0]),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.3", "10.0.0.4"], [0, 1]),
        (["10.0.0.1"], ["10.0.0.3", "10.0.1.4"], [0, 0]),
        (["10.0.0.1", "10.0.1.1"], ["10.0.1.9"], [1]),
        (["fd00:0:0:1::1", "fd00:0:0:2::1"], ["fd00:0:0:2::7", "fd00:0:0:1::7"], [1, 0]),
    ],
)  # fmt: skip
def test_a_port_of_the_peer_is_served_by_one_in_its_network_or_else_in_order(ours, theirs, serving):
    assert matched([rail("x", host).gid for host in ours], [rail("y", host).gid for host in theirs]) == serving
