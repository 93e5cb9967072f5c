"""Checkpoints: whole logical tensors in safetensors files, JSON beside them, complete once a manifest verifies."""
