"""The command line: one file a command, and the root where everything else is put together.

Nothing here is imported before it is needed: ``myelin --help`` must answer at once.
"""
