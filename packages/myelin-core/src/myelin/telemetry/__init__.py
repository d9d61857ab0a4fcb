"""What a run tells of itself: the names of its phases, spans and attributes, and where spans go."""
