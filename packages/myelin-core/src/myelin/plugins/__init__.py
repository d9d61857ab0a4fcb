"""Plugins: what may be extended (specs), what is installed (discovery), and how the rest of Myelin asks (registry)."""
