"""Myelin engine: numba kernels over GGUF-quantized layers."""
