"""Microbenchmarks: what single operations cost on this machine. Its modules import torch: import them inside functions."""
