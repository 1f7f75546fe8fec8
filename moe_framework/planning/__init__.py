"""What a configuration will need, from arithmetic alone: no torch, nothing allocated."""
