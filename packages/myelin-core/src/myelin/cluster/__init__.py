"""Nodes: the provider contract, and what the orchestrator wants of them."""
