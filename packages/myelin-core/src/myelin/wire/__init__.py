"""What crosses between processes, as bytes: control messages, data-plane records, and what is inside records."""
