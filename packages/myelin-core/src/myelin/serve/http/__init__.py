"""The HTTP server: health, metrics, the live page; other routers join it.

``address`` and ``health`` cost nothing to import; what needs the web framework is imported once the server starts.
"""
