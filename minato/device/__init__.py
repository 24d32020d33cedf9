"""Copies batches to an accelerator."""
