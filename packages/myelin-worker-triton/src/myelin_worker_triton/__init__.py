"""Myelin engine: Triton kernels over GGUF-quantized layers."""
