"""Saved activations in host memory and on NVMe until their backward."""
