"""Start the processes that train together, arrange their devices in a mesh, and run collectives."""
