"""Message streams between nodes: the contract, the handshake, gRPC, memory; mutual TLS will live in ``tls.py``."""
