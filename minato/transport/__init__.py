"""How samples come from a worker to the program: rows, messages, tensors over the arena."""
