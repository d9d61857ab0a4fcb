"""Myelin provider: stages as actors on a Ray cluster."""
