"""Conversion between Hugging Face folders, our checkpoints and Megatron-Core's, tensor by tensor."""
