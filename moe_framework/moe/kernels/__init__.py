"""Triton kernels, each beside the plain-torch function that it must equal."""
