"""Serving: text in, text out, over a live pipeline; the prompt RPC; conversations."""
