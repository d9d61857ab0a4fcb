"""The configuration section ``vastai``: the account, what a machine must have to be rented, and patience."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

API_URL = "https://console.vast.ai"


def _expanded(value: object) -> object:
    """A path with ``~`` written out; the empty string is no path."""
    if isinstance(value, str):
        return Path(value).expanduser() if value else None
    return value


class VastaiSection(BaseModel):
    """The table ``[vastai]`` of the configuration: the account, what a machine must have to be rented, and patience."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr | None = Field(
        None,
        description="key of the Vast.ai account; the vastai tool's own file is read where it is empty",
        json_schema_extra={"environment": ["VAST_API_KEY", "VASTAI_API_KEY"]},
    )
    api_url: str = Field(
        API_URL, description="base URL of the Vast.ai service", json_schema_extra={"environment": ["VAST_URL"]}
    )

    gpu_name: str = Field("", description="name of the GPU, such as RTX 3090; several are separated by commas")
    num_gpus: int = Field(1, ge=1, le=16, description="GPUs of a machine, exactly")
    min_gpu_ram_gb: float = Field(0.0, ge=0, description="memory of the GPU in GB, at least")
    min_compute_cap: float = Field(0.0, ge=0, description="compute capability of the GPU, such as 8.0, at least")
    min_cuda: float = Field(12.4, ge=0, description="CUDA version that the machine's driver supports, at least")
    min_download_mbps: float = Field(0.0, ge=0, description="download speed in Mbit/s, at least")
    min_upload_mbps: float = Field(0.0, ge=0, description="upload speed in Mbit/s, at least")
    min_reliability: float = Field(0.0, ge=0, le=1, description="the host's reliability, at least")
    min_direct_ports: int = Field(2, ge=0, description="ports that the machine can open to the outside, at least")
    verified: bool = Field(True, description="only machines that Vast.ai has verified")
    max_dollars_per_hour: float = Field(0.0, ge=0, description="price of a machine at most; 0 is no limit")
    max_run_dollars_per_hour: float = Field(
        0.0, ge=0, description="price of all machines of the run together at most; 0 is no limit"
    )
    blocked_hosts: tuple[int, ...] = Field((), description="ids of hosts that are never rented from")
    blocked_machines: tuple[int, ...] = Field((), description="ids of machines that are never rented")
    disk_gb: float = Field(32.0, ge=8, description="disk to rent with a machine, in GB")
    confirm_lease: bool = Field(
        True, description="ask before the first machine is rented; false agrees to the price, as --yes does"
    )

    image: str = Field("vastai/pytorch", description="container image of the node; it needs Python 3.11 and a shell")
    python: str = Field("python3", description="the interpreter on the node")
    setup: str = Field(
        "", description="shell command that installs Myelin on the node; pip installs this version where it is empty"
    )
    ssh_identity: Annotated[Path | None, BeforeValidator(_expanded)] = Field(
        None, description="private SSH key; ~/.ssh/id_ed25519, id_ecdsa or id_rsa where it is empty"
    )
    ssh_user: str = Field("root", description="who logs in on the node")
    node_port: int = Field(
        0, ge=0, le=65535, description="port inside the node that is mapped to the outside; 0 takes one by the label"
    )
    node_bind: str = Field("0.0.0.0", description="address inside the node that its worker listens on")

    ready_timeout_s: float = Field(1800.0, gt=0, description="seconds from renting until a node listens")
    ssh_timeout_s: float = Field(600.0, gt=0, description="seconds from a running machine until SSH answers")
    destroy_timeout_s: float = Field(60.0, gt=0, description="seconds until a destroyed machine must be off the list")
    poll_s: float = Field(10.0, gt=0, description="seconds between looks at the machines while they start")
    call_spacing: float = Field(
        1.0, ge=0, le=100, description="how far calls to Vast.ai are spaced; 1 is as far as it asks"
    )
    dead_man_s: float = Field(
        900.0, ge=0, description="seconds without a worker after which a machine destroys itself; 0 is never"
    )
