"""The decoder. Shape letters are explained in `moe_framework.moe`."""
