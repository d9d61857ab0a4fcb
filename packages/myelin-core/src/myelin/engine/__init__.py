"""What computes a stage: the contract, the slow and obvious reference engine, and sampling."""
