"""Tile shapes, by kernel, architecture, element size and head width: data, chosen by measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """BLOCK_M queries x BLOCK_N keys a tile, warps a program, how many loop iterations of loads are in flight, the most registers a
    thread may take (None: as many as it wants), and, on Hopper, whether the last product of an iteration overlaps the next one."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    overlap: bool = False


# Under the interpreter a tile is a numpy array: small ones, so that short sequences have several.
INTERPRETED = Config(32, 32, 4, 1)

# (kernel, element bytes, widest head width) -> Config. A width takes the first row at least as wide.
_HOPPER = {
    ("forward", 2, 64): Config(128, 64, 8, 2, registers=128),
    ("forward", 2, 128): Config(128, 64, 8, 2, registers=128),
    ("forward", 2, 256): Config(128, 64, 8, 2),
    ("key_gradient", 2, 64): Config(64, 64, 4, 2, overlap=True),
    ("key_gradient", 2, 128): Config(64, 64, 4, 2, overlap=True),
    ("key_gradient", 2, 256): Config(32, 64, 8, 2),
    ("query_gradient", 2, 64): Config(128, 64, 8, 2),
    ("query_gradient", 2, 128): Config(128, 32, 8, 3, registers=128, overlap=True),
    ("query_gradient", 2, 256): Config(64, 32, 8, 2),
}

# Ampere and later without Hopper's warpgroup products, and anything else Triton runs on; 99 KB of shared memory is enough.
_PORTABLE = {
    ("forward", 2, 64): Config(128, 64, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 2),
    ("forward", 2, 256): Config(64, 32, 8, 2),
    ("key_gradient", 2, 64): Config(32, 64, 4, 2),
    ("key_gradient", 2, 128): Config(32, 64, 4, 2),
    ("key_gradient", 2, 256): Config(32, 32, 8, 1),
    ("query_gradient", 2, 64): Config(64, 64, 4, 2),
    ("query_gradient", 2, 128): Config(64, 32, 4, 2),
    ("query_gradient", 2, 256): Config(32, 32, 8, 1),
}

# fp32 in ieee precision runs on the ordinary cores: 64x64 tiles spill thousands of times.
_FULL_PRECISION = {
    ("forward", 4, 64): Config(32, 32, 4, 2),
    ("forward", 4, 128): Config(32, 16, 8, 1),
    ("forward", 4, 256): Config(16, 16, 4, 1),
    ("key_gradient", 4, 64): Config(16, 32, 4, 1),
    ("key_gradient", 4, 128): Config(16, 32, 8, 1),
    ("key_gradient", 4, 256): Config(16, 16, 8, 1),
    ("query_gradient", 4, 64): Config(32, 16, 4, 1),
    ("query_gradient", 4, 128): Config(32, 16, 8, 1),
    ("query_gradient", 4, 256): Config(16, 16, 8, 1),
}


def config(kernel: str, arch: int, element_bytes: int, width: int) -> Config:
    """`arch` is the compute capability as 80, 90, ...; 0 where there is none (ROCm)."""
    table = _FULL_PRECISION if element_bytes == 4 else _HOPPER if 90 <= arch < 100 else _PORTABLE
    widths = [w for (name, size, w) in table if name == kernel and size == element_bytes and w >= width]
    return table[kernel, element_bytes, min(widths)]
