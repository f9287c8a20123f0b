"""The node stack: versions, units, containerd and its network."""
