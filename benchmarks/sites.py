"""Environments to measure in: this project's own, and one per peer, made by uv from the registry and kept in .peers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OWN", "SITES", "Site", "SiteError", "python_of"]

_FOLDER = Path(__file__).parent / ".peers"
_TORCH = "torch==2.13.*"  # the same for all, so that no one is measured on another torch
OWN = "kapell"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What an environment holds."""

    packages: tuple[str, ...]
    """Requirements."""
    bare: tuple[str, ...] = ()
    """Requirements installed without what they depend on: the rest is not needed for what is measured."""
    versions: tuple[str, ...] = ()
    """Packages whose versions are reported."""


SITES: Mapping[str, Site] = {
    "verl": Site(
        packages=(
            _TORCH, "tensordict>=0.8,<=0.10.0,!=0.9.0", "ray>=2.60,<2.61", "numpy", "codetiming", "packaging", "pandas",
            "hydra-core", "omegaconf", "cachetools", "psutil", "transformers>=5.5.3,!=5.6.0,<5.11",
        ),
        bare=("verl==0.9.1",),
        versions=("verl", "tensordict", "torch", "ray", "numpy"),
    ),
    "trl": Site(
        packages=(_TORCH, "trl==1.16.*", "transformers==5.23.*"),
        versions=("trl", "transformers", "accelerate", "torch"),
    ),
    # The last release with a PPO trainer.
    "trl_ppo": Site(
        packages=(_TORCH, "trl==1.12.*", "transformers==5.23.*"),
        versions=("trl", "transformers", "accelerate", "torch"),
    ),
    "transferqueue": Site(
        packages=(_TORCH, "transferqueue==0.1.*", "ray>=2.60,<2.61"),
        versions=("TransferQueue", "tensordict", "torch", "ray"),
    ),
    "torchmonarch": Site(packages=(_TORCH, "torchmonarch==0.7.*", "numpy"), versions=("torchmonarch", "torch")),
}  # fmt: skip
OWN_VERSIONS = (
    "kapell-protocol", "kapell-decorators", "kapell-workergroup", "kapell-ray-backend", "kapell-trainer",
    "torch", "tensordict", "numpy", "ray", "transformers",
)  # fmt: skip


class SiteError(RuntimeError):
    """An environment could not be made."""


def python_of(name: str) -> str:
    """The interpreter of an environment; makes the environment when it is missing or its requirements changed.

    Raises `SiteError` with uv's last words.
    """
    if name == OWN:
        return sys.executable
    site = SITES[name]
    folder = _FOLDER / name
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(repr((site.packages, site.bare, sys.version_info[:2])).encode()).hexdigest()
    mark = folder / "made-from"
    if python.exists() and mark.is_file() and mark.read_text() == wanted:
        return str(python)
    _FOLDER.mkdir(exist_ok=True)
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--quiet", "--python", str(python), *site.packages)
    if site.bare:
        _uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", *site.bare)
    mark.write_text(wanted)
    return str(python)


def _uv(*arguments: str) -> None:
    environment = dict(os.environ)
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    try:
        done = subprocess.run(
            ["uv", *arguments], env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
    except FileNotFoundError:
        raise SiteError("uv is not on PATH; run `python -m pip install uv`") from None
    except subprocess.TimeoutExpired:
        raise SiteError(f"uv {' '.join(arguments[:2])} took longer than 20 minutes") from None
    if done.returncode:
        raise SiteError(f"uv {' '.join(arguments[:2])} failed: {done.stderr.strip()[-500:]}")
