"""Batches on their way to an accelerator."""
