"""A provider for Myelin: nodes as child processes of this machine."""
