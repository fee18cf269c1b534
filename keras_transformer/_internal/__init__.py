"""Helpers shared by the rooms. Nothing here is public."""
