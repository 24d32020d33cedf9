"""Transport of samples from workers to the program: rows, messages, tensors over the arena."""
