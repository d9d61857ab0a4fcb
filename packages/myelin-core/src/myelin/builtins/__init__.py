"""Core's own plugins. They register through the same entry points and hooks as anyone's."""
