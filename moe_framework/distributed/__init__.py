"""Ranks, meshes and collectives: everything that knows about processes."""
