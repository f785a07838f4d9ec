"""What happens to activations beside the layers: dropout by logical unit, recomputation."""
