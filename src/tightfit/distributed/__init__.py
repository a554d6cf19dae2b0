"""Processes that train together: how they find each other, the device mesh, and collectives."""
