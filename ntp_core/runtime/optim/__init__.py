"""State per parameter element: planes that follow blocks, and the optimizer that keeps them."""
