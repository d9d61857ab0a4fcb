"""What Vast.ai has to rent: reading its answers, what may be rented, and which is best. Pure.

An *ask* is Vast.ai's word for something to rent; an :class:`~myelin.plugin.Offer` is made from it. An offer's id is
``<ask>-m<machine>``: the machine is in it, so that excluding a failed offer excludes its machine, whatever ask it comes
back under.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from myelin.plugin import Need, Offer
from myelin_provider_vastai.section import VastaiSection

SEARCH_LIMIT = 64
IMAGE_BYTES = 4_000_000_000
"""What an image and its packages weigh, about, for the time to fetch them."""
ASSUMED_MBPS = 100.0
"""Download speed of a machine that doesn't tell."""
HOST_ENGINES = frozenset({"cpu", "reference"})
"""Engines that compute in the host's memory; all others need the GPU's."""
_OFFER = re.compile(r"([0-9]+)-m([0-9]+)")


@dataclass(frozen=True, slots=True)
class Ask:
    """One machine, or a part of one, that can be rented.

    Attributes:
        id, machine, host: Vast.ai's numbers.
        gpu: Its name, such as ``RTX 3090``.
        gpus: How many.
        gpu_ram_mb, cpu_ram_mb: Memory of one GPU, and of the host, in MB; 0 is unknown.
        compute_cap: Times 100: 860 is 8.6.
        cuda: The newest version that the driver supports.
        price: Dollars an hour.
        reliability: 0 to 1.
        verified, rentable: As Vast.ai says.
        down_mbps, up_mbps: Mbit/s; 0 is unknown.
        direct_ports: How many ports can be mapped.
        place: Where it stands.
    """

    id: int
    machine: int
    host: int
    gpu: str
    gpus: int
    gpu_ram_mb: float
    cpu_ram_mb: float
    compute_cap: float
    cuda: float
    price: float
    reliability: float
    verified: bool
    rentable: bool
    down_mbps: float
    up_mbps: float
    direct_ports: int
    place: str

    @property
    def offer_id(self) -> str:
        """``<ask>-m<machine>``."""
        return f"{self.id}-m{self.machine}"


def read_ask(document: Mapping[str, Any]) -> Ask | None:
    """An ask of an answer; None where it lacks what a lease needs (id, machine, price). Anything else may lack."""
    price = _number(document.get("dph_total"), -1.0)
    ask_id, machine = _whole(document.get("id"), -1), _whole(document.get("machine_id"), -1)
    if ask_id < 0 or machine < 0 or price < 0:
        return None
    return Ask(
        id=ask_id,
        machine=machine,
        host=_whole(document.get("host_id")),
        gpu=str(document.get("gpu_name") or ""),
        gpus=_whole(document.get("num_gpus"), 1),
        gpu_ram_mb=_number(document.get("gpu_ram")),
        cpu_ram_mb=_number(document.get("cpu_ram")),
        compute_cap=_number(document.get("compute_cap")),
        cuda=_number(document.get("cuda_max_good")),
        price=price,
        reliability=_number(document.get("reliability2")),
        verified=document.get("verification") == "verified",
        rentable=document.get("rentable") is not False,
        down_mbps=_number(document.get("inet_down")),
        up_mbps=_number(document.get("inet_up")),
        direct_ports=_whole(document.get("direct_port_count")),
        place=str(document.get("geolocation") or ""),
    )


def search_query(section: VastaiSection) -> dict[str, Any]:
    """What to ask the service for. It filters coarsely; :func:`misfit` decides."""
    query: dict[str, Any] = {
        "rentable": {"eq": True},
        "num_gpus": {"eq": section.num_gpus},
        "order": [["dph_total", "asc"]],
        "type": "on-demand",
        "limit": SEARCH_LIMIT,
        "allocated_storage": section.disk_gb,
    }
    if section.verified:
        query["verified"] = {"eq": True}
    if names := gpu_names(section.gpu_name):
        query["gpu_name"] = {"eq": names[0]} if len(names) == 1 else {"in": list(names)}
    least = {
        "gpu_ram": section.min_gpu_ram_gb * 1000,
        "compute_cap": round(section.min_compute_cap * 100),
        "cuda_max_good": section.min_cuda,
        "inet_down": section.min_download_mbps,
        "inet_up": section.min_upload_mbps,
        "reliability2": section.min_reliability,
        "direct_port_count": section.min_direct_ports,
    }
    query |= {field: {"gte": value} for field, value in least.items() if value > 0}
    if section.max_dollars_per_hour > 0:
        query["dph_total"] = {"lte": section.max_dollars_per_hour}
    return query


def gpu_names(text: str) -> tuple[str, ...]:
    """The names in a setting: ``RTX_3090, RTX 4090`` is two, spelled as Vast.ai spells them."""
    return tuple(name for part in text.split(",") if (name := " ".join(part.replace("_", " ").split())))


def misfit(ask: Ask, need: Need, section: VastaiSection) -> str:
    """Why an ask can't be rented for ``need``; empty where it can. What a machine doesn't tell, it doesn't have."""
    names = {name.lower() for name in gpu_names(section.gpu_name)}
    room = memory_bytes(ask, need.engine)
    excluded = excluded_machines(need.exclude)
    checks = (
        (not ask.rentable, "it is rented"),
        (ask.id in excluded_asks(need.exclude) or ask.machine in excluded, "it failed before"),
        (ask.machine in section.blocked_machines, "its machine is blocked"),
        (ask.host in section.blocked_hosts, "its host is blocked"),
        (bool(names) and ask.gpu.lower() not in names, "another GPU"),
        (ask.gpus != section.num_gpus, "another number of GPUs"),
        (ask.gpu_ram_mb < section.min_gpu_ram_gb * 1000, "too little GPU memory"),
        (0 < room < need.memory_bytes, "too little memory for the stage"),
        (ask.compute_cap < round(section.min_compute_cap * 100), "compute capability too low"),
        (ask.cuda < section.min_cuda, "CUDA too old"),
        (ask.down_mbps < section.min_download_mbps, "download too slow"),
        (ask.up_mbps < section.min_upload_mbps, "upload too slow"),
        (ask.reliability < section.min_reliability, "not reliable enough"),
        (ask.direct_ports < section.min_direct_ports, "too few open ports"),
        (section.verified and not ask.verified, "not verified"),
        (0 < section.max_dollars_per_hour < ask.price, "too dear"),
    )
    return next((reason for wrong, reason in checks if wrong), "")


def ranked(asks: Iterable[Ask], need: Need, section: VastaiSection) -> list[Ask]:
    """Those that fit, best first: the least :func:`expected_price`, the lower id where that is the same."""
    fitting = [ask for ask in asks if not misfit(ask, need, section)]
    return sorted(fitting, key=lambda ask: (expected_price(ask, need.memory_bytes), ask.id))


def expected_price(ask: Ask, stage_bytes: int) -> float:
    """Dollars for the first useful hour: the hour, and the time in which image and stage are fetched before it.

    ``price · (1 + 8·(image + stage) / (download · 10⁶ · 3600)) / reliability``, download in Mbit/s, and a
    reliability of at least one half, since a machine that fails must be paid for and replaced.
    """
    speed = ask.down_mbps or ASSUMED_MBPS
    fetch_hours = 8 * (IMAGE_BYTES + stage_bytes) / (speed * 1e6 * 3600)
    return ask.price * (1 + fetch_hours) / max(ask.reliability, 0.5)


def memory_bytes(ask: Ask, engine: str) -> int:
    """What a stage may use there: the GPUs' memory, or the host's for an engine that computes in that; 0 is unknown."""
    megabytes = ask.cpu_ram_mb if engine in HOST_ENGINES else ask.gpu_ram_mb * ask.gpus
    return int(megabytes * 1_000_000)


def as_offer(ask: Ask, engine: str) -> Offer:
    """What the orchestrator sees of an ask."""
    cards = f"{ask.gpus}× {ask.gpu}" if ask.gpus > 1 else ask.gpu
    description = f"{cards or 'no GPU'}, {ask.gpu_ram_mb / 1000:.0f} GB, ${ask.price:.3f}/h, {ask.place or 'somewhere'}"
    details = {
        "machine": str(ask.machine),
        "host": str(ask.host),
        "gpu": ask.gpu,
        "cuda": f"{ask.cuda:g}",
        "down_mbps": f"{ask.down_mbps:.0f}",
        "up_mbps": f"{ask.up_mbps:.0f}",
        "reliability": f"{ask.reliability:.4f}",
    }
    return Offer(ask.offer_id, "vastai", description, memory_bytes(ask, engine), ask.price, details, room=1)


def excluded_asks(exclude: Collection[str]) -> frozenset[int]:
    """The asks in the ids of excluded offers."""
    return frozenset(int(match[1]) for offer in exclude if (match := _OFFER.fullmatch(offer)))


def excluded_machines(exclude: Collection[str]) -> frozenset[int]:
    """The machines in the ids of excluded offers."""
    return frozenset(int(match[2]) for offer in exclude if (match := _OFFER.fullmatch(offer)))


def ask_of(offer: str) -> int | None:
    """The ask in an offer's id."""
    match = _OFFER.fullmatch(offer)
    return int(match[1]) if match else None


def machine_of(offer: str) -> int | None:
    """The machine in an offer's id."""
    match = _OFFER.fullmatch(offer)
    return int(match[2]) if match else None


def in_turn(asks: Sequence[Ask], taken: Collection[int]) -> list[Ask]:
    """``asks`` with the machines in ``taken`` last: other nodes have been shown those first, and will take them."""
    return sorted(asks, key=lambda ask: ask.machine in taken)


def _number(value: object, otherwise: float = 0.0) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def _whole(value: object, otherwise: int = 0) -> int:
    return int(_number(value, float(otherwise)))
