"""These tests run the kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
