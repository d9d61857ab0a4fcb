"""Configuration: sections, the layers they are read from, and where each value came from."""
