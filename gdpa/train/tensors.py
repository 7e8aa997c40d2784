"""The safetensors layout of named tensors, as checkpoints have it (gdpa.distributed.storage).

8 bytes     the length of the header, little-endian
header      JSON: name -> {"dtype", "shape", "data_offsets": [first byte, last byte + 1] after the header}
the bytes of the tensors, one after the other, in C order
"""

from __future__ import annotations

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000
