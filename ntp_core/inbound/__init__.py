"""What comes from outside and leaves for others: bounded reads, checked values, plain JSON."""
