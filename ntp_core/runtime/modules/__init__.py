"""Any module over uneven ranks: styles around layers, Hugging Face models."""
