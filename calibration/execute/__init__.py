"""Plans carried out by PyTorch itself. Its modules import torch: import them inside the function that needs them."""
