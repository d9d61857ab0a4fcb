"""Models on other machines: asked about once, read by ranges, kept in a cache of files with holes."""
