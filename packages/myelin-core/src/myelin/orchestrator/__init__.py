"""From a request to a live chain of stages: the bootstrap's phases, the pipeline, and the events that people see."""
