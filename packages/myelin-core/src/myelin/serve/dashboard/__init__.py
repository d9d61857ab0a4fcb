"""The live page: what is known of a run as one bounded document, kept up to date by increments."""
