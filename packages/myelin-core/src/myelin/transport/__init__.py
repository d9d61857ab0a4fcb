"""Message streams between nodes: the contract, the handshake, TCP, gRPC, memory; mutual TLS will live in ``tls.py``."""

import os

# gRPC's handlers for fork(), on by default, crash a child now and then while its parent has streams open (measured,
# grpcio 1.85 under uvloop, which forks: 3 of 150 children ended by SIGSEGV before they were anything). A process that
# serves starts other ones, replacements for lost nodes, and never goes on in a forked child itself. gRPC reads this
# when it is imported, which modules of this package do.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
