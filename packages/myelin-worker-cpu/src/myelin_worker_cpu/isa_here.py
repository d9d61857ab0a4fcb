"""The instruction set of this process, fixed when the kernels are first imported.

Kept apart from :mod:`myelin_worker_cpu.isa` so that asking what a machine could do decides nothing.
"""

from __future__ import annotations

from myelin_worker_cpu.isa import chosen

ISA = chosen()
"""What every kernel of this process is made of."""
