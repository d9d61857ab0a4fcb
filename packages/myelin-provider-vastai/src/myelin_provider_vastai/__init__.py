"""Myelin provider: nodes rented on Vast.ai."""
